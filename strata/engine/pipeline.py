"""Windows through the stages in order, results back to whoever listens: the engine of messages.py.

Theory. Each stage has a thread and a queue; a window's hidden states go from queue to queue, so several windows are in flight at
once, one in each stage, and never overtake each other. The last stage turns logits into picks. Queues are unbounded on purpose: how
many windows are in flight is the slot machine's decision, and it waits for every one of them. On devices a thread only enqueues, and
the streams wait for each other (hop.py); the last stage's thread alone waits for a window's end, and then knows what each stage took.

Failure rules. An exception belongs to the window it struck: that one is reported with the stage's name and the cause (an
allocation that failed, too), the others go on. An error of a device may come to light in a later stage than the one that made it: the
first stage whose device reports one is named. A device that is lost ends the engine, for no window on it would end otherwise. What breaks
a thread itself (an exception out of ``deliver``, an interpreter shutting
down) ends the engine: one ``EngineFailed`` without windows, after which nothing is delivered. Work given to an engine that has ended
is dropped: the listener knows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from strata.devices.base import DeviceError, DeviceLost
from strata.engine.stage import Clock, Hidden, Stage, StageMemory, StageModel, StageTimes, Work
from strata.messages import CopyDone, EngineEvent, EngineFacts, EngineFailed, PageCopy, SegmentResult, Window, WindowDone

log = logging.getLogger(__name__)

Results = tuple[SegmentResult, ...]
Sample = Callable[[Window, Hidden], Results]
Draft = Callable[[Window, Results], Results]


class Pipeline:
    """Implements ``messages.Engine`` over stage models, each with its name.

    ``sample`` turns the last stage's logits into results, ``draft`` adds drafts to them. ``release`` is called once, when the threads
    have ended. ``memory`` is set by whoever planned it: what each stage takes.
    """

    def __init__(
        self,
        models: Sequence[tuple[str, StageModel]],
        facts: EngineFacts,
        sample: Sample,
        release: Callable[[], None] = lambda: None,
        clock: Clock = time.perf_counter,
        draft: Draft | None = None,
    ) -> None:
        self.facts = facts
        self.memory: tuple[StageMemory, ...] = ()
        self.stages = tuple(Stage(name, model, clock) for name, model in models)
        self._sample = sample
        self._draft = draft
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
            self._die(stage, error)

    def _die(self, stage: Stage, error: BaseException) -> None:
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
        results: Results | None = None
        drafting = 0.0
        try:
            stage.forward(work)
            if index + 1 == len(self.stages):
                assert work.data is not None
                results, drafting = self._drafted(window, self._sample(window, work.data))
            work.timers += (stage.timer(self._clock() - started),)
            return None if results is None else WindowDone(window.id, results, *self._seconds(work), drafting)
        except Exception as error:
            return self._window_failed(index, window, error)

    def _seconds(self, work: Work) -> tuple[float, tuple[float, ...]]:
        """What a window that has left the last stage took: in all, and each stage."""
        seconds = tuple([timer() for timer in reversed(work.timers)][::-1])  # the last stage's waits for all
        for stage, one in zip(self.stages, seconds, strict=True):
            if stage.is_device:
                stage.account(one)
        return sum(seconds), seconds

    def _window_failed(self, index: int, window: Window, error: Exception) -> EngineEvent | None:
        """None where the engine has ended with it."""
        stage = self.stages[index]
        if isinstance(error, DeviceError):
            stage = next((earlier for earlier in self.stages[:index] if earlier.is_broken()), stage)
        if isinstance(error, DeviceLost):
            self._die(stage, error)
            return None
        log.exception("%s: window %d failed", stage.name, window.id)
        return EngineFailed(f"{stage.name}: {describe(error)}", (window.id,))

    def _drafted(self, window: Window, results: Results) -> tuple[Results, float]:
        """``results`` with drafts, and the seconds that took. Drafts are worth no request: where they fail, the engine goes on without."""
        if self._draft is None:
            return results, 0.0
        started = self._clock()
        try:
            results = self._draft(window, results)
        except DeviceLost:
            raise
        except Exception:
            log.exception("%s: drafting failed; there are no drafts from here on", self.stages[-1].name)
            self._draft = None
        return results, self._clock() - started

    def _run_copy(self, index: int, work: Work, copy: PageCopy) -> EngineEvent | None:
        """One stage of a copy. After a failure it passes the other stages untouched, so that its end is still reported in order."""
        stage = self.stages[index]
        try:
            if not work.error:
                stage.copy(copy)
        except DeviceLost as error:
            self._die(stage, error)
            return None
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
