"""Drafts within windows: which source is asked for whom, what the pipeline reports of it, and what happens when drafting breaks."""

from __future__ import annotations

import logging
import queue
from collections.abc import Sequence
from dataclasses import replace

import pytest

from strata.engine.draft import Ask, Drafter
from strata.engine.pipeline import Pipeline
from strata.messages import DraftLimits, DraftSource, Segment, SegmentResult, Tokens, Window, WindowDone
from strata.request import Sampling
from tests.engine.test_pipeline import FACTS, WAIT, FakeModel, sample, window

Results = tuple[SegmentResult, ...]


class Fixed:
    """Drafts what it is told to, by slot, and keeps what it was asked."""

    def __init__(self, name: DraftSource, drafts: dict[int, Tokens]) -> None:
        self.name, self.drafts = name, drafts
        self.asked: list[list[tuple[int, int]]] = []
        self.seen: list[int] = []

    def observe(self, window: Window, results: Sequence[SegmentResult]) -> None:
        self.seen.append(window.id)

    def propose(self, asks: Sequence[Ask]) -> list[Tokens]:
        self.asked.append([(ask.segment.slot, ask.limit) for ask in asks])
        return [self.drafts.get(ask.segment.slot, ())[:ask.limit] for ask in asks]


def segment(slot: int, limits: DraftLimits) -> Segment:
    return Segment(f"r{slot}", slot, 10, (1,), (0,), Sampling(), draft_limits=limits)


def test_the_first_source_that_finds_something_serves_a_slot() -> None:
    lookup, head = Fixed("lookup", {0: (7, 8), 2: (9,)}), Fixed("mtp", {0: (1,), 1: (2, 3, 4), 2: (5,)})
    segments = [segment(0, DraftLimits(3, 1)), segment(1, DraftLimits(2, 3)), segment(2, DraftLimits(1, 0)), segment(3, DraftLimits(0, 0))]
    results = tuple(SegmentResult(picks=(slot,)) for slot in range(4))
    found = Drafter([lookup, head])(Window(5, "decode", 0, tuple(segments)), results)
    assert [(one.drafts, one.draft_source) for one in found] == [((7,), "lookup"), ((2, 3), "mtp"), ((5,), "mtp"), ((), "")]
    assert [replace(one, drafts=(), draft_source="") for one in found] == list(results)
    assert (lookup.asked, head.asked) == ([[(0, 1), (1, 3)]], [[(1, 2), (2, 1)]])
    assert lookup.seen == head.seen == [5]


@pytest.mark.parametrize("result", [SegmentResult(), SegmentResult(error="broken")])
def test_nothing_follows_a_part_of_a_prompt_or_a_broken_row(result: SegmentResult) -> None:
    head = Fixed("mtp", {0: (1,)})
    assert Drafter([head])(Window(1, "prompt", 0, (segment(0, DraftLimits(3, 3)),)), (result,)) == (result,)
    assert head.asked == [[]] and head.seen == [1]


def test_the_last_picks_position_counts_accepted_drafts() -> None:
    two_of_three = Segment("r", 0, 10, (1, 2, 3, 4), (0,), Sampling(), num_drafts=3)
    assert Ask(two_of_three, (2, 3, 9), 1).position == 13
    assert Ask(Segment("r", 0, 0, (1, 2, 3, 4), (0,), Sampling()), (5,), 1).position == 4


def run(draft, windows: int) -> list[WindowDone]:
    ticks = iter(range(1, 1000))
    pipeline = Pipeline([("one", FakeModel(1)), ("two", FakeModel(2))], FACTS, sample, clock=lambda: float(next(ticks)), draft=draft)
    events: queue.Queue = queue.Queue()
    pipeline.start(events.put)
    try:
        for number in range(windows):
            pipeline.submit(window(number))
        return [events.get(timeout=WAIT) for _ in range(windows)]
    finally:
        pipeline.close()


def test_the_pipeline_adds_drafts_and_tells_how_long_they_took() -> None:
    def draft(window: Window, results: Results) -> Results:
        return tuple(replace(result, drafts=(window.id,), draft_source="mtp") for result in results)

    for number, done in enumerate(run(draft, 3)):
        assert done.results == (SegmentResult(picks=(12,), drafts=(number,), draft_source="mtp"),)
        assert 1 <= done.draft_seconds < done.stage_seconds[-1] < done.seconds


def test_without_a_drafter_no_time_is_spent() -> None:
    assert [done.draft_seconds for done in run(None, 2)] == [0, 0]


def test_a_drafter_that_breaks_costs_its_drafts_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def draft(window: Window, results: Results) -> Results:
        asked.append(window.id)
        if window.id == 1:
            raise ValueError("broken head")
        return results

    with caplog.at_level(logging.ERROR):
        done = run(draft, 4)
    assert [event.results for event in done] == [(SegmentResult(picks=(12,)),)] * 4
    assert asked == [0, 1]
    assert "two: drafting failed" in caplog.text and "broken head" in caplog.text
