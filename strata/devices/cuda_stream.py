"""Streams, events and graphs of one GPU, over the CuPy that cuda.py hands in; and what to make of an error.

Rules of CUDA that this file keeps:
  - the current device belongs to a host thread, and a thread that never chose one is on the first GPU, where any call would make a
    context of some hundred MiB. So every call selects its GPU, at no cost where it is selected already;
  - streams do not wait for the default stream, or they could not be captured;
  - a capture belongs to its stream, not to the GPU: another stage may run windows on the same GPU meanwhile. It is relaxed (CuPy's
    default), or a page copy of that other stage would break it;
  - a capture that was broken off must still be ended, or its stream can never be used again;
  - what an event of a GPU that is gone reports, every later call on that GPU reports: ``DeviceLost``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from strata.devices.base import DeviceError, DeviceLost

# cudaError_t, driver_types.h: after these a context reports the same error from every call.
LOST = frozenset({
    46,  # devices unavailable
    214, 220,  # memory or NVLink: an error that could not be corrected
    700,  # illegal address
    702,  # launch timeout: the display's watchdog
    709,  # context is destroyed
    710,  # a device-side assert
    714, 715, 716, 717, 718, 719, 720, 721,  # the launch failed, in several ways
    999,  # unknown
})  # fmt: skip

_here = threading.local()
"""``ordinal``: the GPU selected in this thread. ``capturing``: a stream of this thread is being captured."""

Self = TypeVar("Self")
Given = ParamSpec("Given")
Result = TypeVar("Result")


class Context:
    """GPU number ``ordinal`` for the threads that use it. ``name``: for errors."""

    def __init__(self, cupy: Any, ordinal: int, name: str) -> None:
        self.cupy, self.ordinal, self.name = cupy, ordinal, name

    def select(self) -> None:
        if getattr(_here, "ordinal", None) != self.ordinal:
            self.cupy.cuda.runtime.setDevice(self.ordinal)
            _here.ordinal = self.ordinal

    @property
    def is_capturing(self) -> bool:
        """Whether this thread is."""
        return getattr(_here, "capturing", False)

    def failure(self, error: RuntimeError) -> DeviceError:
        """CuPy's error in our words."""
        kind = DeviceLost if getattr(error, "status", None) in LOST else DeviceError
        return kind(f"{self.name}: {error}")


def on_device(method: Callable[Concatenate[Self, Given], Result]) -> Callable[Concatenate[Self, Given], Result]:
    """A method of an object with a ``context``: its GPU is selected first, and errors of CUDA (RuntimeError in CuPy) are DeviceErrors."""

    @wraps(method)
    def call(self: Self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        context: Context = self.context  # type: ignore[attr-defined]
        try:
            context.select()
            return method(self, *args, **kwargs)
        except DeviceError:
            raise
        except RuntimeError as error:
            raise context.failure(error) from error

    return call


class CudaEvent:
    """A CUDA event; one that was never recorded counts as passed."""

    @on_device
    def _create(self, timed: bool) -> Any:
        return self.context.cupy.cuda.Event(block=False, disable_timing=not timed)

    def __init__(self, context: Context, timed: bool = False) -> None:
        self.context = context
        self.handle = self._create(timed)
        self.is_recorded = False

    @on_device
    def synchronize(self) -> None:
        if self.is_recorded:
            self.handle.synchronize()

    @on_device
    def query(self) -> bool:
        return not self.is_recorded or bool(self.handle.done)


class CudaStream:
    """A non-blocking CUDA stream. ``graph``: what is being captured from it."""

    @on_device
    def _create(self) -> Any:
        return self.context.cupy.cuda.Stream(non_blocking=True)

    def __init__(self, context: Context) -> None:
        self.context = context
        self.handle = self._create()
        self.graph: CudaGraph | None = None

    @on_device
    def record(self, event: CudaEvent) -> None:
        self.handle.record(event.handle)
        event.is_recorded = True

    @on_device
    def wait(self, event: CudaEvent) -> None:
        if event.is_recorded:
            self.handle.wait_event(event.handle)

    @on_device
    def synchronize(self) -> None:
        self.handle.synchronize()

    @contextmanager
    def capture(self) -> Iterator[CudaGraph]:
        graph = CudaGraph(self.context)
        self._begin()
        self.graph, _here.capturing = graph, True
        try:
            yield graph
        except BaseException:
            self._stop()
            try:
                self._end()
            except DeviceError:
                pass  # a capture that CUDA gave up on; what broke it is on its way up
            raise
        self._stop()
        graph.handle = self._end()

    def _stop(self) -> None:
        self.graph, _here.capturing = None, False

    @on_device
    def _begin(self) -> None:
        self.handle.begin_capture()

    @on_device
    def _end(self) -> Any:
        return self.handle.end_capture()


class CudaGraph:
    """A captured graph, complete when its ``with`` block has ended. ``kept``: what its launches read, which must outlive it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.handle: Any = None
        self.kept: list[object] = []

    @on_device
    def replay(self, stream: CudaStream) -> None:
        self.handle.launch(stream.handle)
