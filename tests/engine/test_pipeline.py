"""The pipeline over fake stages: order, overlap, exactly one event per window, failures by blame, copies, closing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np
import pytest

from strata.engine.pipeline import Pipeline
from strata.messages import CopyDone, EngineEvent, EngineFailed, EngineFacts, PageCopy, Segment, SegmentResult, Window, WindowDone

FACTS = EngineFacts(num_pages=8, page_tokens=4, context=32)
WAIT = 300.0  # a deadline for a broken pipeline; nothing here waits for time to pass


def window(number: int) -> Window:
    return Window(number, "decode", 0, (Segment("r", 0, number, (number,), (0,)),))


class FakeModel:
    """Adds its ``step`` to the hidden states and keeps pages in a dict. ``before`` runs first, with the window."""

    def __init__(self, step: int, before: Callable[[Window], None] = lambda window: None) -> None:
        self.step, self.before = step, before
        self.seen: list[object] = []
        self.pages: dict[int, str] = {}

    def forward(self, window: Window, hidden: np.ndarray | None) -> np.ndarray:
        self.before(window)
        self.seen.append(window.id)
        return (np.zeros(1, np.float32) if hidden is None else hidden) * 10 + self.step

    def copy_out(self, pages: tuple[int, ...]) -> object:
        self.seen.append(("out", pages))
        return [self.pages[page] for page in pages]

    def copy_in(self, image: list[str], pages: tuple[int, ...]) -> None:
        self.seen.append(("in", pages))
        self.pages.update(zip(pages, image, strict=True))


def sample(window: Window, logits: np.ndarray) -> tuple[SegmentResult, ...]:
    return (SegmentResult(picks=(int(logits[0]),)),)


class Running:
    """A started pipeline and the queue of its events."""

    def __init__(self, *models: FakeModel, sample=sample) -> None:
        self.models = models
        self.pipeline = Pipeline([(f"stage {i}", model) for i, model in enumerate(models)], FACTS, sample)
        self.events: queue.Queue[EngineEvent] = queue.Queue()

    def __enter__(self) -> Running:
        self.pipeline.start(self.events.put)
        return self

    def __exit__(self, *error: object) -> None:
        self.pipeline.close()

    def next(self) -> EngineEvent:
        return self.events.get(timeout=WAIT)


def test_windows_pass_the_stages_in_order_and_report_once_each() -> None:
    with Running(FakeModel(1), FakeModel(2), FakeModel(3)) as running:
        for number in range(50):
            running.pipeline.submit(window(number))
        done = [running.next() for _ in range(50)]
    assert [event.window_id for event in done] == list(range(50))
    assert all(isinstance(event, WindowDone) and event.results == (SegmentResult(picks=(123,)),) for event in done)
    assert running.events.empty()
    assert all(model.seen == list(range(50)) for model in running.models)
    assert [(times.name, times.windows) for times in running.pipeline.times] == [("stage 0", 50), ("stage 1", 50), ("stage 2", 50)]


def test_stages_work_on_different_windows_at_the_same_time() -> None:
    """Each window meets its follower: the barrier opens only if stage 1 runs window n while stage 0 runs window n + 1."""
    together = threading.Barrier(2, timeout=WAIT)
    first = FakeModel(1, lambda window: None if window.id == 0 else together.wait() and None)
    second = FakeModel(2, lambda window: None if window.id == 5 else together.wait() and None)
    with Running(first, second) as running:
        for number in range(6):
            running.pipeline.submit(window(number))
        assert [running.next().window_id for _ in range(6)] == list(range(6))


def test_seconds_are_those_of_work_and_not_of_waiting() -> None:
    """A clock that only the stages' work moves forward."""
    now = [0.0]

    def work(window: Window) -> None:
        now[0] += 2.0

    pipeline = Pipeline([("a", FakeModel(1, work)), ("b", FakeModel(2, work))], FACTS, sample, clock=lambda: now[0])
    events: queue.Queue[EngineEvent] = queue.Queue()
    pipeline.start(events.put)
    for number in range(3):  # one at a time, so that no other stage moves the clock meanwhile
        pipeline.submit(window(number))
        assert events.get(timeout=WAIT).seconds == 4.0
    pipeline.close()
    assert [times.busy for times in pipeline.times] == [6.0, 6.0]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("error", [ValueError("bad\nrow"), MemoryError("no room")])
def test_an_exception_fails_its_window_alone_and_names_the_stage(stage: int, error: Exception) -> None:
    def fail(window: Window) -> None:
        if window.id == 1:
            raise error

    models = [FakeModel(1), FakeModel(2)]
    models[stage].before = fail
    with Running(*models) as running:
        for number in range(4):
            running.pipeline.submit(window(number))
        events = {getattr(event, "window_id", None): event for event in (running.next() for _ in range(4))}
    failed = events.pop(None)
    assert failed == EngineFailed(f"stage {stage}: {type(error).__name__}: {' '.join(str(error).split())}", (1,))
    assert sorted(events) == [0, 2, 3]
    assert models[1].seen == [0, 2, 3]


def test_an_exception_while_sampling_fails_its_window_alone() -> None:
    def broken(window: Window, logits: np.ndarray) -> tuple[SegmentResult, ...]:
        if window.id == 0:
            raise ZeroDivisionError
        return sample(window, logits)

    with Running(FakeModel(1), sample=broken) as running:
        running.pipeline.submit(window(0))
        running.pipeline.submit(window(1))
        assert running.next() == EngineFailed("stage 0: ZeroDivisionError", (0,))
        assert running.next().window_id == 1


def test_a_thread_that_ends_ends_the_engine_once() -> None:
    def leave(window: Window) -> None:
        if window.id == 1:
            raise SystemExit("told to")

    with Running(FakeModel(1), FakeModel(2, leave)) as running:
        for number in range(5):
            running.pipeline.submit(window(number))
        events = []
        while not events or isinstance(events[-1], WindowDone):
            events.append(running.next())
        for thread in running.pipeline._threads:
            thread.join(WAIT)
            assert not thread.is_alive()
        running.pipeline.submit(window(9))
    assert events[-1] == EngineFailed("stage 1: SystemExit: told to", ())
    assert [event.window_id for event in events[:-1]] == [0]
    assert running.events.empty()


def test_a_listener_that_raises_ends_the_engine() -> None:
    calls: list[EngineEvent] = []
    told = threading.Event()

    def deliver(event: EngineEvent) -> None:
        calls.append(event)
        if isinstance(event, EngineFailed):
            told.set()
        else:
            raise RuntimeError("loop is closed")

    pipeline = Pipeline([("only", FakeModel(1))], FACTS, sample)
    pipeline.start(deliver)
    pipeline.submit(window(0))
    pipeline.submit(window(1))
    assert told.wait(WAIT)
    pipeline.close()
    assert calls[1:] == [EngineFailed("only: RuntimeError: loop is closed", ())]


def test_close_finishes_the_stage_at_work_and_drops_the_rest() -> None:
    entered, release = threading.Event(), threading.Event()

    def hold(window: Window) -> None:
        entered.set()
        assert release.wait(WAIT)

    with Running(FakeModel(1, hold), FakeModel(2)) as running:
        for number in range(3):
            running.pipeline.submit(window(number))
        assert entered.wait(WAIT)
        closer = threading.Thread(target=running.pipeline.close)
        closer.start()
        assert running.pipeline._ended.wait(WAIT)
        release.set()
        closer.join(WAIT)
        assert not closer.is_alive()
        running.pipeline.close()
    assert running.events.empty()
    assert running.models[0].seen == [0] and running.models[1].seen == []


def test_close_may_be_called_by_the_listener_and_before_the_start() -> None:
    closed = threading.Event()
    pipeline = Pipeline([("only", FakeModel(1))], FACTS, sample)

    def deliver(event: EngineEvent) -> None:
        pipeline.close()
        closed.set()

    pipeline.start(deliver)
    pipeline.submit(window(0))
    assert closed.wait(WAIT)
    pipeline.close()
    with pytest.raises(RuntimeError):
        pipeline.start(deliver)
    Pipeline([("only", FakeModel(1))], FACTS, sample).close()


def test_copies_keep_their_place_among_windows_on_every_stage() -> None:
    models = FakeModel(1), FakeModel(2)
    for model in models:
        model.pages = {page: f"{model.step}/{page}" for page in range(4)}
    with Running(*models) as running:
        running.pipeline.submit(window(0))
        running.pipeline.copy(PageCopy(7, "out", 50, (2, 0)))
        running.pipeline.submit(window(1))
        running.pipeline.copy(PageCopy(8, "in", 50, (6, 5)))
        running.pipeline.copy(PageCopy(9, "drop", 50))
        running.pipeline.submit(window(2))
        events = [running.next() for _ in range(5)]
    assert [event.copy_id if isinstance(event, CopyDone) else event.window_id for event in events] == [0, 7, 1, 8, 2]
    assert all(event.error == "" for event in events if isinstance(event, CopyDone))
    for model in models:
        assert model.seen == [0, ("out", (2, 0)), 1, ("in", (6, 5)), 2]
        assert (model.pages[6], model.pages[5]) == (f"{model.step}/2", f"{model.step}/0")


def test_a_failed_copy_reports_its_stage_and_leaves_no_half_image() -> None:
    models = FakeModel(1), FakeModel(2)
    models[0].pages = {3: "x"}
    with Running(*models) as running:
        running.pipeline.copy(PageCopy(1, "out", 9, (3,)))
        assert running.next() == CopyDone(1, "stage 1: KeyError: 3")
        running.pipeline.copy(PageCopy(2, "in", 9, (3,)))
        assert running.next() == CopyDone(2, "stage 0: KeyError: 9")
        running.pipeline.submit(window(0))
        assert running.next().window_id == 0
        assert [stage.images for stage in running.pipeline.stages] == [{}, {}]
