"""Groups of slots in a layer split, measured on this machine beside what the formula and the simulated machine predict.

    python tools/bench_stages.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf
    python tools/bench_stages.py --model FILE --stages 4 --threads 8 --streams 16

Arms, which take turns in every round: one stage with all threads; the stages with one group (a window of all streams visits them in turn);
with one group a stage; with ``--batch-groups auto``. All engines live in this process and are driven by the slot machine, without HTTP;
tokens are counted while every stream decodes. Medians over the rounds.

``formula``: R / max(G * max_s t_s(R / G), sum_s t_s(R / G) + x), from the stage times t_s that the arm itself measured. ``alone``: the same
with the times of the one-group arms at so many rows, where no other stage computes; the difference is how much the stages hinder each
other. ``simulated``: the slot machine under the virtual clock of tools/simulate.py with the arm's own times. Errors are against measured.
Also says which cut the measured times suggest. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strata.config import Settings  # noqa: E402
from strata.engine.load import load_engine  # noqa: E402
from strata.engine.pipeline import Pipeline  # noqa: E402
from strata.messages import EngineEvent, RequestEvent, Window, WindowDone  # noqa: E402
from strata.request import Request, Sampling  # noqa: E402
from strata.slots import SlotMachine, SlotManager, SlotPolicy  # noqa: E402
from strata.weights.gguf import GGUFFile  # noqa: E402
from tools._stages import PROMPT, Arm, Meter, Times, formula, simulated, suggest  # noqa: E402


class Watched:
    """An engine that outlives its managers, and notes what every decode window took."""

    def __init__(self, engine: Pipeline) -> None:
        self.facts, self._engine = engine.facts, engine
        self._rows: dict[int, int] = {}
        self._deliver: Callable[[EngineEvent], None] = lambda event: None
        self.windows: list[tuple[int, Times]] = []
        engine.start(self._report)
        self.copy = engine.copy
        self.stages: tuple[Any, ...] = engine.stages

    def start(self, deliver: Callable[[EngineEvent], None]) -> None:
        self._deliver = deliver

    def submit(self, window: Window) -> None:
        if window.kind == "decode":
            self._rows[window.id] = len(window.segments)
        self._engine.submit(window)

    def _report(self, event: EngineEvent) -> None:
        if isinstance(event, WindowDone) and event.window_id in self._rows:
            self.windows.append((self._rows.pop(event.window_id), event.stage_seconds))
        self._deliver(event)

    def close(self) -> None:
        """A manager's end is not the engine's."""


async def one_round(arm: Arm, engine: Watched, manager: SlotManager, tokens: int, rng: random.Random) -> None:
    """All streams at once, to their end."""
    manager.start(asyncio.get_running_loop())
    meter, done = Meter(arm.streams, time.monotonic), asyncio.Event()

    def deliver(event: RequestEvent) -> None:
        meter.take(event)
        if not meter.left:
            done.set()

    engine.windows.clear()
    for number in range(arm.streams):
        prompt = tuple(rng.randrange(3, 500) for _ in range(PROMPT))
        manager.submit(Request(f"{number}", prompt, tokens, Sampling(temperature=0.0)), deliver)
    await done.wait()
    arm.rates.append(meter.rate)
    arm.windows += engine.windows
    arm.used.append(manager.view().groups)


# ---------------------------------------------------------------- the run


@contextmanager
def engines(model: str, stages: int, threads: int, split: str, streams: int) -> Iterator[dict[int, Watched]]:
    """One engine of one stage and one of ``stages``, by their number of stages."""
    with GGUFFile.open(model) as file:
        common: dict[str, Any] = {"model": Path(model), "threads": threads, "batch": streams, "context": 512}
        cut: dict[str, Any] = {"devices": ("cpu",) * stages} if split == "auto" else {"layer_split": split}
        loaded = {1: load_engine(Settings(**common), file), stages: load_engine(Settings(**common, **cut), file)}
        try:
            yield {count: Watched(engine) for count, engine in loaded.items()}
        finally:
            for engine in loaded.values():
                engine.close()


def arms_of(options: argparse.Namespace) -> list[Arm]:
    stages, streams = options.stages, options.streams
    return [
        Arm(f"1 stage, {options.threads} threads", 1, 1, streams),
        Arm(f"{stages} stages, 1 group", stages, 1, streams),
        Arm(f"{stages} stages, {stages} groups", stages, stages, streams),
        Arm(f"{stages} stages, auto", stages, 0, streams),
        # For the stage times of a group's rows where no other stage computes.
        Arm(f"{stages} stages, 1 group of {streams // stages}", stages, 1, streams // stages),
    ]


async def measure(options: argparse.Namespace, arms: Sequence[Arm], by_stages: dict[int, Watched]) -> None:
    """Every arm in turn, round by round; the first round only warms up."""
    rng = random.Random(1)
    managers = []
    for arm in arms:
        engine = by_stages[arm.stages]
        machine = SlotMachine(engine.facts, SlotPolicy(slots=arm.streams, groups=arm.groups, shelf=False))
        managers.append(SlotManager(machine, engine, time.monotonic))
    for number in range(options.rounds + 1):
        for arm, manager in zip(arms, managers):
            await one_round(arm, by_stages[arm.stages], manager, options.tokens, rng)
            if not number:
                arm.rates.clear()
                arm.windows.clear()
                arm.used.clear()
    for manager in managers:
        manager.close()


def report(options: argparse.Namespace, arms: Sequence[Arm], by_stages: dict[int, Watched]) -> dict[str, object]:
    single, joined, grouped, auto, few = arms
    rows = options.streams
    if not (single.times(rows) and joined.times(rows) and grouped.times(rows // options.stages) and few.times(rows // options.stages)):
        raise SystemExit("the answers ended before all of them ran together: raise --tokens")
    whole, part = joined.times(rows), few.times(rows // options.stages)
    between = max(0.0, rows / joined.rate - sum(whole))
    own_part = grouped.times(rows // options.stages)
    predictions = {
        single.name: ([single.times(rows)], [single.times(rows)]),
        joined.name: ([whole], [whole]),
        grouped.name: ([own_part] * options.stages, [part] * options.stages),
    }
    print(f"\n| {rows} streams | tokens/s | of one stage | stage ms | formula | error | alone | error | simulated | error |")
    print("| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    out: dict[str, object] = {}
    for arm in (single, joined, grouped, auto):
        values = [f"{arm.rate:.1f}", f"{100 * arm.rate / single.rate:.0f} %"]
        if arm.name in predictions:
            own, alone = predictions[arm.name]
            values.append(" + ".join(f"{1e3 * seconds:.1f}" for seconds in own[0]))
            figures = [formula(own, rows, between), formula(alone, rows, between)]
            figures.append(simulated(arm, by_stages[arm.stages].facts, arm.measured, between))
        else:
            values += [f"groups: {', '.join(map(str, arm.used))}", "", "", "", ""]
            figures = [simulated(arm, by_stages[arm.stages].facts, {**joined.measured, **grouped.measured}, between)]
        values += [text for figure in figures for text in (f"{figure:.1f}", f"{100 * (figure / arm.rate - 1):+.0f} %")]
        print(f"| {arm.name} | " + " | ".join(values) + " |")
        out[arm.name] = {"tokens_s": round(arm.rate, 1), "predicted": [round(figure, 1) for figure in figures]}
    return out


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="in all; divided between the stages (2)")
    parser.add_argument("--split", default="auto", help="as --layer-split (auto)")
    parser.add_argument("--streams", type=int, default=8, help="a multiple of the stages (8)")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer (48)")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds (3)")
    options = parser.parse_args(argv)
    if options.stages < 2 or options.streams % options.stages:
        parser.error("at least two stages, and streams that are a multiple of them")
    arms = arms_of(options)
    with engines(options.model, options.stages, options.threads, options.split, options.streams) as by_stages:
        asyncio.run(measure(options, arms, by_stages))
        found = report(options, arms, by_stages)
        spans = [len(stage.model.layers) for stage in by_stages[options.stages].stages]
        times = arms[1].times(options.streams)
        print(f"\nlayers {'+'.join(map(str, spans))}; by measured times: --layer-split {suggest(times, spans)}")
    print(json.dumps({"bench": "stages", "streams": options.streams, "layers": spans, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
