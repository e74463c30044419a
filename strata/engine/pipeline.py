"""Windows through the stages in order, results back to whoever listens: the engine of messages.py.

Theory. Each stage has a thread and a queue; a window's hidden states go from queue to queue, so several windows are in flight at
once, one in each stage, and never overtake each other. The last stage turns logits into picks. Queues are unbounded on purpose: how
many windows are in flight is the slot machine's decision, and it waits for every one of them.

Failure rules. An exception belongs to the window it struck: that one is reported with the stage's name and the cause (an
allocation that failed, too), the others go on. What breaks a thread itself (an exception out of ``deliver``, an interpreter shutting
down) ends the engine: one ``EngineFailed`` without windows, after which nothing is delivered. Work given to an engine that has ended
is dropped: the listener knows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from strata.engine.stage import Clock, Hidden, Stage, StageMemory, StageModel, StageTimes, Work
from strata.messages import CopyDone, EngineEvent, EngineFacts, EngineFailed, PageCopy, SegmentResult, Window, WindowDone

log = logging.getLogger(__name__)

Sample = Callable[[Window, Hidden], tuple[SegmentResult, ...]]


class Pipeline:
    """Implements ``messages.Engine`` over stage models, each with its name.

    ``sample`` turns the last stage's logits into results. ``release`` is called once, when the threads have ended. ``memory`` is set by
    whoever planned it: what each stage takes.
    """

    def __init__(
        self,
        models: Sequence[tuple[str, StageModel]],
        facts: EngineFacts,
        sample: Sample,
        release: Callable[[], None] = lambda: None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.facts = facts
        self.memory: tuple[StageMemory, ...] = ()
        self.stages = tuple(Stage(name, model, clock) for name, model in models)
        self._sample = sample
        self._release = release
        self._clock = clock
        self._deliver: Callable[[EngineEvent], None] | None = None
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._ending = threading.Lock()

    # ------------------------------------------------------------ for any thread

    def start(self, deliver: Callable[[EngineEvent], None]) -> None:
        """Start the threads. Work submitted before waits in the first queue. Raises RuntimeError when called twice."""
        if self._deliver is not None:
            raise RuntimeError("this pipeline has been started already")
        self._deliver = deliver
        for index, stage in enumerate(self.stages):
            # Daemons, so that a host program that forgets close() can still end.
            self._threads.append(threading.Thread(target=self._serve, args=(index,), name=f"strata-{stage.name}", daemon=True))
        for thread in self._threads:
            thread.start()

    def submit(self, window: Window) -> None:
        self.stages[0].inbox.put(Work(window))

    def copy(self, copy: PageCopy) -> None:
        self.stages[0].inbox.put(Work(copy))

    def close(self) -> None:
        """Stop: a window in a stage is finished there and dropped, queued ones are dropped, nothing is delivered afterwards."""
        self._end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        release, self._release = self._release, lambda: None
        release()

    @property
    def times(self) -> tuple[StageTimes, ...]:
        """Busy and wait seconds of each stage, for the metrics."""
        return tuple(stage.times for stage in self.stages)

    # ------------------------------------------------------------ on the stages' threads

    def _serve(self, index: int) -> None:
        stage = self.stages[index]
        try:
            stage.serve(lambda work: self._handle(index, work))
        except BaseException as error:
            log.exception("%s has ended", stage.name)
            if self._end() and self._deliver is not None:
                self._deliver(EngineFailed(f"{stage.name}: {describe(error)}"))

    def _handle(self, index: int, work: Work) -> None:
        if self._ended.is_set():
            return
        event = self._run_window(index, work) if isinstance(work.job, Window) else self._run_copy(index, work, work.job)
        if self._ended.is_set():
            return
        if event is not None:
            assert self._deliver is not None
            self._deliver(event)
        elif index + 1 < len(self.stages):
            self.stages[index + 1].inbox.put(work)

    def _run_window(self, index: int, work: Work) -> EngineEvent | None:
        """One stage of a window: its event when it ends here, None when it goes on."""
        window, stage, started = work.job, self.stages[index], self._clock()
        assert isinstance(window, Window)
        results: tuple[SegmentResult, ...] | None = None
        try:
            stage.forward(work)
            if index + 1 == len(self.stages):
                assert work.data is not None
                results = self._sample(window, work.data)
        except Exception as error:
            log.exception("%s: window %d failed", stage.name, window.id)
            return EngineFailed(f"{stage.name}: {describe(error)}", (window.id,))
        work.seconds += (self._clock() - started,)
        return None if results is None else WindowDone(window.id, results, sum(work.seconds), work.seconds)

    def _run_copy(self, index: int, work: Work, copy: PageCopy) -> EngineEvent | None:
        """One stage of a copy. After a failure it passes the other stages untouched, so that its end is still reported in order."""
        stage = self.stages[index]
        try:
            if not work.error:
                stage.copy(copy)
        except Exception as error:
            log.exception("%s: copy %d failed", stage.name, copy.id)
            work.error = f"{stage.name}: {describe(error)}"
        if index + 1 < len(self.stages) or copy.direction == "drop":
            return None
        if work.error and copy.direction == "out":
            self.copy(PageCopy(copy.id, "drop", copy.host))  # the earlier stages hold half an image
        return CopyDone(copy.id, work.error)

    def _end(self) -> bool:
        """Let every thread run out. True for the caller who ended it."""
        with self._ending:
            if self._ended.is_set():
                return False
            self._ended.set()
        for stage in self.stages:
            stage.inbox.put(None)
        return True


def describe(error: BaseException) -> str:
    """The cause in one line, for a log and for the client of the request that it struck."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
