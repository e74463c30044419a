"""A loaded engine from the outside: greedy goldens through windows, seeded rows, progress, and what closing gives back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from strata.config import Settings
from strata.engine import cpu_load
from strata.engine.load import load_engine
from strata.errors import ModelError, SettingError
from strata.messages import CopyDone, EngineEvent, PageCopy, Segment, SegmentResult, Window, WindowDone
from strata.request import Sampling
from strata.weights.gguf import GGUFFile

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
GREEDY = Sampling(temperature=0)


class Client:
    """Plays the slot machine: one conversation per slot, its pages and its length."""

    def __init__(self, engine, pages_each: int = 2) -> None:
        self.engine, self.pages_each = engine, pages_each
        self.events: queue.Queue[EngineEvent] = queue.Queue()
        self.windows = 0
        engine.start(self.events.put)

    def run(self, kind: str, *segments: Segment) -> tuple[SegmentResult, ...]:
        self.windows += 1
        self.engine.submit(Window(self.windows, kind, 0, segments))
        event = self.events.get(timeout=300)
        assert isinstance(event, WindowDone) and event.window_id == self.windows, event
        return event.results

    def segment(self, slot: int, start: int, tokens: list[int], sampling: Sampling | None) -> Segment:
        pages = tuple(range(slot * self.pages_each, (slot + 1) * self.pages_each))
        return Segment(f"r{slot}", slot, start, tuple(tokens), pages, sampling)

    def answers(self, prompts: list[list[int]], settings: list[Sampling], count: int) -> list[list[int]]:
        """Read every prompt, then decode all slots together."""
        rows = [list(prompt) for prompt in prompts]
        for slot, row in enumerate(rows):
            row += self.run("prompt", self.segment(slot, 0, row, settings[slot]))[0].picks
        while len(rows[0]) < len(prompts[0]) + count:
            window = [self.segment(slot, len(row) - 1, row[-1:], settings[slot]) for slot, row in enumerate(rows)]
            for row, result in zip(rows, self.run("decode", *window)):
                row += result.picks
        return [row[len(prompt):] for row, prompt in zip(rows, prompts)]


@contextmanager
def loaded(name: str, **settings) -> Iterator[Client]:
    with GGUFFile.open(GOLDEN / f"{name}.gguf") as file:
        engine = load_engine(Settings(threads=2, **settings), file)
        try:
            yield Client(engine)
        finally:
            engine.close()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["llama-yarn", "qwen3"])
def test_greedy_tokens_are_those_of_transformers(name: str, deterministic: bool) -> None:
    golden = np.load(GOLDEN / f"{name}.npz")
    with loaded(name, deterministic=deterministic) as client:
        tokens, = client.answers([golden["greedy_prompt"].tolist()], [GREEDY], 48)
    assert tokens == golden["greedy"].tolist()


def test_seeded_tokens_do_not_depend_on_the_other_slots() -> None:
    rng = np.random.default_rng(4)
    prompts = [rng.integers(3, 512, 5 + slot).tolist() for slot in range(4)]
    settings = [Sampling(seed=slot, temperature=1.5, top_p=0.95 if slot % 2 else 1.0) for slot in range(4)]
    with loaded("qwen2", batch=4) as client:
        together = client.answers(prompts, settings, 12)
        alone = [client.answers([prompt], [sampling], 12)[0] for prompt, sampling in zip(prompts, settings)]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == 4


def test_parked_pages_come_back_as_they_were() -> None:
    """A conversation goes to host memory, its pages are overwritten, it comes back elsewhere and goes on as if nothing had been."""
    with loaded("llama-bias", batch=4) as client:
        prompt = list(range(20, 40))
        unbroken = client.answers([prompt], [GREEDY], 6)[0]
        client.run("prompt", client.segment(0, 0, prompt, None))
        client.engine.copy(PageCopy(1, "out", 5, (0, 1)))
        assert client.events.get(timeout=300) == CopyDone(1)
        client.run("prompt", client.segment(0, 0, prompt[::-1], None))
        client.engine.copy(PageCopy(2, "in", 5, (4, 5)))
        assert client.events.get(timeout=300) == CopyDone(2)
        row = prompt + unbroken[:1]
        while len(row) < len(prompt) + 6:
            row += client.run("decode", client.segment(2, len(row) - 1, row[-1:], GREEDY))[0].picks
    assert row[len(prompt):] == unbroken


def test_progress_rises_to_all_of_the_weights() -> None:
    seen: list[tuple[int, int]] = []
    with GGUFFile.open(GOLDEN / "qwen2.gguf") as file:
        load_engine(Settings(threads=1), file, lambda done, total: seen.append((done, total))).close()
        size = sum(tensor.size for tensor in file.tensors.values())
    assert seen[-1] == (size, size)
    assert seen == sorted(seen) and len(set(seen)) > 20, "a step for each tensor"


def test_closing_ends_every_thread_and_a_failed_load_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    with loaded("qwen2") as client:
        client.run("prompt", client.segment(0, 0, [5, 6, 7], GREEDY))
        mine = set(threading.enumerate()) - before
    assert len(mine) == 2, "one for the stage, one beside it"

    def broken(*args: object) -> None:
        mine.update(set(threading.enumerate()) - before)
        raise ModelError("broken tensor")

    monkeypatch.setattr(cpu_load, "StageModel", broken)
    with GGUFFile.open(GOLDEN / "qwen2.gguf") as file, pytest.raises(ModelError):
        load_engine(Settings(threads=2), file)
    for thread in mine:
        thread.join(30)
        assert not thread.is_alive()


def test_sizes_that_do_not_fit_are_refused_before_any_weight_is_read() -> None:
    seen: list[tuple[int, int]] = []
    with GGUFFile.open(GOLDEN / "qwen2.gguf") as file, pytest.raises(SettingError):
        load_engine(Settings(kv_memory_mib=1, context=1 << 20), file, lambda done, total: seen.append((done, total)))
    assert seen == []
