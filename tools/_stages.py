"""What tools/bench_stages.py counts and predicts: arms and their measurements, the formula, the simulated machine."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strata.engine.split import balance  # noqa: E402
from strata.engine.stage_cost import Costs as StageCosts  # noqa: E402
from strata.messages import EngineFacts, NewTokens, RequestEvent, Terminal, Window  # noqa: E402
from strata.request import Request, Sampling  # noqa: E402
from strata.slots import SlotPolicy  # noqa: E402
from strata.slots.curve import line  # noqa: E402
from strata.slots.grouping import turn  # noqa: E402
from tools._simulation import Costs, World  # noqa: E402

PROMPT = 16
Times = tuple[float, ...]


@dataclass
class Arm:
    """One way to run ``streams`` answers. ``groups`` 0: auto. ``rates``: tokens/s by round; ``windows``: (rows, seconds by stage)."""

    name: str
    stages: int
    groups: int
    streams: int
    rates: list[float] = field(default_factory=list)
    windows: list[tuple[int, Times]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def times(self, rows: int) -> Times:
        """Median seconds of each stage for windows of ``rows`` rows."""
        return tuple(statistics.median(stage) for stage in zip(*(times for count, times in self.windows if count == rows)))

    @property
    def measured(self) -> dict[int, Times]:
        """``times`` of every number of rows that came often enough."""
        counts = [rows for rows, _ in self.windows]
        return {rows: self.times(rows) for rows in sorted(set(counts)) if counts.count(rows) >= 3}


class Meter:
    """Counts tokens while all of ``streams`` answers decode; ``now`` is the clock."""

    def __init__(self, streams: int, now: Callable[[], float]) -> None:
        self._started: set[str] = set()
        self._streams, self._now = streams, now
        self._begin = self._end = 0.0
        self._tokens = 0
        self.left = streams

    def take(self, event: RequestEvent) -> None:
        if isinstance(event, NewTokens):
            if len(self._started) == self._streams and not self._end:
                self._tokens += len(event.tokens)
            self._started.add(event.request_id)
            if len(self._started) == self._streams and not self._begin:
                self._begin = self._now()
        elif isinstance(event, Terminal):
            self._end = self._end or self._now()
            self.left -= 1

    @property
    def rate(self) -> float:
        return self._tokens / (self._end - self._begin)


# ---------------------------------------------------------------- predictions


def formula(windows: Sequence[Times], rows: int, between: float) -> float:
    return rows / turn(windows, between)


@dataclass(frozen=True)
class MeasuredCosts(Costs):
    """Costs of every stage by the number of rows, read off a line between those measured."""

    measured: tuple[tuple[int, Times], ...] = ()

    def stage_seconds(self, window: Window, stage: int) -> float:
        if window.kind != "decode":
            return 0.001
        rows = sum(len(segment.tokens) for segment in window.segments)
        exact = dict(self.measured)
        if rows in exact or len(exact) < 2:
            return exact.get(rows, self.measured[0][1])[stage]
        sizes, times = zip(*self.measured)
        fixed, per_row = line(sizes, [each[stage] for each in times], [1] * len(sizes))
        return fixed + per_row * rows


def simulated(arm: Arm, facts: EngineFacts, measured: dict[int, Times], between: float) -> float:
    """Tokens/s of the slot machine in the virtual world."""
    costs = MeasuredCosts(0.0, 0.0, measured=tuple(sorted(measured.items())))
    world = World(facts, SlotPolicy(slots=arm.streams, groups=arm.groups), costs)
    meter = Meter(arm.streams, lambda: world.clock.now)
    tell = world._tell

    def overhear(event: RequestEvent) -> None:
        meter.take(event)
        tell(event)

    world._tell = overhear  # type: ignore[method-assign]
    done = world.stages.done
    world.stages.done = lambda window: world.clock.after(between, lambda: done(window))
    for number in range(arm.streams):
        world.ask(Request(f"{number}", (number,) * PROMPT, 400, Sampling()), lambda place: 0, lambda outcome: None)
    world.clock.run()
    return meter.rate


def suggest(times: Times, spans: Sequence[int]) -> str:
    """The cut that the measured stage times ask for, if a layer costs the same wherever it lies."""
    layers = [seconds / count for seconds, count in zip(times, spans)]
    layer = min(layers)
    last = max(0.0, times[-1] - layer * spans[-1])
    cut = balance([StageCosts((layer,) * sum(spans), last)] * len(spans))
    return ",".join(str(span.start) for span in (cut or [])[1:])
