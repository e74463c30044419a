"""As much of CuPy as the CUDA device uses, for a machine without a GPU: it writes down what it is asked, by whom and in which order.

Names, arguments and errors are CuPy's (version 14); test_calls.py compares the names with an installed CuPy. What it enforces are rules
of CUDA that a GPU would enforce, or punish later: see ``Driver``.
"""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class Driver:
    """The GPUs of a machine: (name, compute capability, MiB in all, MiB free) each. ``calls``: (what, GPU) in order.

    Every call needs the calling thread to have chosen a GPU. A GPU in ``lost`` fails every call with an illegal address. Copies are done at
    once and in the host's memory; ``peers``: pairs of GPUs that reach each other.
    """

    def __init__(self, *cards: tuple[str, str, int, int], error: str = "", peers: tuple[tuple[int, int], ...] = ()) -> None:
        self.cards, self.error, self.peers = cards, error, peers
        self.calls: list[tuple[str, int]] = []
        self.enabled: set[tuple[int, int]] = set()
        self.lost: set[int] = set()
        self.clock = 0.0
        self._chosen = threading.local()

    def note(self, what: str) -> int:
        ordinal: int | None = getattr(self._chosen, "ordinal", None)
        assert ordinal is not None, f"{what}: this thread has not chosen a GPU, and would make a context on the first"
        self.calls.append((what, ordinal))
        if ordinal in self.lost:
            raise CUDARuntimeError(700)
        return ordinal

    @property
    def names(self) -> list[str]:
        return [what for what, _ in self.calls]

    def choose(self, ordinal: int) -> None:
        self._chosen.ordinal = ordinal


class Runtime:
    """cupy.cuda.runtime."""

    memcpyDefault, hostAllocPortable = 4, 1

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def getDeviceCount(self) -> int:
        if self._driver.error:
            raise RuntimeError(self._driver.error)
        return len(self._driver.cards)

    def setDevice(self, ordinal: int) -> None:
        self._driver.choose(ordinal)

    def getDeviceProperties(self, ordinal: int) -> dict[str, Any]:
        self._driver.note("properties")
        name, capability, total, _ = self._driver.cards[ordinal]
        major, minor = capability.split(".")
        return {"name": name.encode(), "major": int(major), "minor": int(minor), "totalGlobalMem": total * MIB}

    def deviceGetPCIBusId(self, ordinal: int) -> str:
        return f"0000:4{ordinal}:00.0"

    def memGetInfo(self) -> tuple[int, int]:
        _, _, total, free = self._driver.cards[self._driver.note("memory")]
        return free * MIB, total * MIB

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self._driver.note("copy")
        assert kind == self.memcpyDefault and nbytes > 0
        ctypes.memmove(target, source, nbytes)

    def eventElapsedTime(self, start: int, end: int) -> float:
        self._driver.note("elapsed")
        return float(end - start)

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        return int((device, peer) in self._driver.peers)

    def deviceEnablePeerAccess(self, peer: int) -> None:
        pair = (self._driver.note("peer"), peer)
        if pair in self._driver.enabled:
            raise CUDARuntimeError(704)
        self._driver.enabled.add(pair)


class Memory:
    """cupy.cuda.Memory, in the host's memory."""

    def __init__(self, driver: Driver, size: int) -> None:
        ordinal = driver.note("malloc")
        if size > driver.cards[ordinal][3] * MIB:
            raise CUDARuntimeError(2)
        self._room = ctypes.create_string_buffer(size)
        self.ptr = ctypes.addressof(self._room)


class PinnedMemory:
    def __init__(self, driver: Driver, size: int, flags: int = 0) -> None:
        driver.note("pinned")
        assert flags == Runtime.hostAllocPortable, "a copy of another GPU would be staged"
        self.room = bytearray(size)


def pinned_pointer(memory: PinnedMemory, offset: int) -> memoryview:
    """cupy.cuda.PinnedMemoryPointer: an object with the buffer protocol."""
    return memoryview(memory.room)[offset:]


class Event:
    """``ptr``: when it was recorded, for Runtime.eventElapsedTime."""

    def __init__(self, driver: Driver, block: bool = False, disable_timing: bool = False) -> None:
        self._driver, self.is_timed, self.ptr, self.done = driver, not disable_timing, 0, False
        self.made_on = driver.note("event")

    def synchronize(self) -> None:
        self._driver.note("wait for event")


class Stream:
    def __init__(self, driver: Driver, non_blocking: bool = False) -> None:
        assert non_blocking, "it would wait for the default stream and could not be captured"
        self._driver, self.ptr, self.is_capturing = driver, id(self), False
        self.made_on = driver.note("stream")

    def record(self, event: Event) -> None:
        assert event.made_on == self.made_on == self._driver.note("record"), "an event is recorded on its own GPU alone"
        self._driver.clock += 1
        event.ptr, event.done = int(self._driver.clock), True

    def wait_event(self, event: Event) -> None:
        self._driver.note("stream waits")

    def synchronize(self) -> None:
        assert not self.is_capturing
        self._driver.note("synchronize")

    def begin_capture(self) -> None:
        self._driver.note("begin capture")
        self.is_capturing = True

    def end_capture(self) -> SimpleNamespace:
        self.is_capturing = False
        self._driver.note("end capture")
        return SimpleNamespace(launch=lambda stream: self._driver.note("replay"))


class RawKernel:
    num_regs = 40

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver, self.name = driver, name

    @property
    def kernel(self) -> RawKernel:
        return self

    def __call__(self, grid: Any, block: Any, args: Any, shared_mem: int = 0, stream: Stream | None = None) -> None:
        assert stream is not None, "the launch would go to the default stream"
        assert self._driver.note(f"launch {self.name}") == stream.made_on
        self.arguments = args


class RawModule:
    def __init__(self, driver: Driver, *, path: str) -> None:
        driver.note("load")
        self._driver = driver

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(self._driver, name)


def fake_cupy(driver: Driver) -> Any:
    """The module ``cupy`` on ``driver``."""
    cuda = SimpleNamespace(
        runtime=Runtime(driver), PinnedMemoryPointer=pinned_pointer,
        Memory=lambda size: Memory(driver, size), PinnedMemory=lambda size, flags=0: PinnedMemory(driver, size, flags),
        Event=lambda **options: Event(driver, **options), Stream=lambda **options: Stream(driver, **options),
    )  # fmt: skip
    return SimpleNamespace(cuda=cuda, RawModule=lambda **options: RawModule(driver, **options))
