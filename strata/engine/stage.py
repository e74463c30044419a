"""One stage of the pipeline: a span of layers on one device, with one thread that takes its work in order.

Rules. Only the stage's thread touches its model and its host images, so neither needs a lock. Work is taken in the order put, which
makes a page copy safe: every window before it has left the stage, no window after it has entered (on a device: in its stream).
Counters are read by anybody (a float is replaced whole). They are written by the stage's thread, but for windows of a device, whose times
are known when they have left the last stage: its thread writes them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from strata.devices.base import DeviceError
from strata.messages import PageCopy, Tokens, Window

Hidden = NDArray[np.float32]
Clock = Callable[[], float]


class StageModel(Protocol):
    """What runs on a stage. ``forward``: hidden float32 [rows, width] in (None on the first stage) and out; the last stage gives the
    logits float32 [wanted rows, vocab] of the rows that ``rows.wanted_rows`` names, in that order.

    ``copy_out`` gives a host image of whole pages of this stage's layers, which ``copy_in`` writes to (other) pages later; a failed
    one raises.
    """

    def forward(self, window: Window, hidden: Hidden | None) -> Hidden: ...

    def copy_out(self, pages: Tokens) -> Any: ...

    def copy_in(self, image: Any, pages: Tokens) -> None: ...


Timer = Callable[[], float]


@runtime_checkable
class DeviceModel(Protocol):
    """What a stage model has besides when its ``forward`` only enqueues: the thread goes on to the next window, the device works later."""

    def timer(self) -> Timer:
        """Seconds that the device takes for the window just enqueued; asked when the window has left the last stage, where it waits."""

    def check(self) -> None:
        """Waits for the device, and raises what broke it."""


@dataclass(slots=True)
class Work:
    """A window or copy on its way through the stages. ``data``: the last stage's output. ``timers``: of each stage so far.
    ``error``: why a copy failed."""

    job: Window | PageCopy
    data: Hidden | None = None
    timers: tuple[Timer, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Since the start: seconds with work and without, windows run."""

    name: str
    busy: float
    wait: float
    windows: int


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What a stage takes of its device, in bytes, as planned before it was loaded: weights, keys and values, everything else.

    ``device``: its name in the settings, which several stages may share; ``pci_id``: where a GPU is plugged in, else "".
    """

    device: str
    weights: int
    kv: int
    work: int
    pci_id: str = ""


@dataclass
class Stage:
    """``name`` goes into every error that the stage causes."""

    name: str
    model: StageModel
    clock: Clock = time.perf_counter
    inbox: SimpleQueue[Work | None] = field(default_factory=SimpleQueue)
    images: dict[int, Any] = field(default_factory=dict)
    busy: float = 0.0
    wait: float = 0.0
    windows: int = 0
    free_since: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.is_device = isinstance(self.model, DeviceModel)

    def serve(self, handle: Callable[[Work], None]) -> None:
        """The thread's body: ``handle`` one piece of work after the other until a None is taken."""
        self.free_since = self.clock()
        while (work := self.inbox.get()) is not None:
            taken = self.clock()
            handle(work)
            if not (self.is_device and isinstance(work.job, Window)):
                self.account(self.clock() - taken)
            del work  # the queue's next wait must not keep the last hidden states alive

    def account(self, seconds: float) -> None:
        """``seconds`` of work have just ended; the time before them, since the last work ended, was waiting."""
        with self.lock:
            now = self.clock()
            self.wait += max(0.0, now - self.free_since - seconds)
            self.busy += seconds
            self.free_since = now

    def forward(self, work: Work) -> None:
        """Run a window, or enqueue it; its input is replaced by its output."""
        assert isinstance(work.job, Window)
        work.data = self.model.forward(work.job, work.data)
        self.windows += 1

    def timer(self, seconds: float) -> Timer:
        """Of the window that ``forward`` has just had, which took the thread ``seconds``."""
        return self.model.timer() if isinstance(self.model, DeviceModel) else lambda: seconds

    def is_broken(self) -> bool:
        """Whether the device reports an error."""
        try:
            if isinstance(self.model, DeviceModel):
                self.model.check()
        except DeviceError:
            return True
        return False

    def copy(self, copy: PageCopy) -> None:
        """Keep, use or forget this stage's image of some pages. Raises what the model raises, and KeyError for an unknown image."""
        if copy.direction == "out":
            self.images[copy.host] = self.model.copy_out(copy.pages)
        elif copy.direction == "in":
            self.model.copy_in(self.images[copy.host], copy.pages)
        else:
            self.images.pop(copy.host, None)

    @property
    def times(self) -> StageTimes:
        return StageTimes(self.name, self.busy, self.wait, self.windows)
