"""The door to a device: the few verbs that kernels, the engine and the tools need, and nothing of CUDA's rest.

Two devices stand behind it: ``cuda.py`` (a GPU, through CuPy) and ``emulated.py`` (the same .cu through the host's C++
compiler). Both run work asynchronously: ``launch`` and the copies only enqueue, and the result is there after the stream
or an event behind the work has been waited for. The emulated device takes that literally and runs nothing earlier.

Rules: a stream belongs to one host thread. Between ``capture`` and its end nothing may allocate or wait; a graph replays the
same launches with the same arguments, so whatever changes from window to window lies in device memory. A host array that
an upload reads, or a download writes, must stay untouched until an event behind the copy has passed (``pinned`` memory, or
the copy may cost a wait).

Errors. Work fails later than the call that enqueued it, so any call can report what an earlier one broke. A kernel that fails takes the
device's context with it: that is ``DeviceLost``, and no later call on the device, or for the emulated device on the stream, succeeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

HostArray = npt.NDArray[Any]
Scalar = np.int32 | np.int64 | np.uint32 | np.float32


@dataclass(frozen=True, slots=True)
class Buffer:
    """Device memory seen as a C-ordered array. ``owner`` keeps the allocation alive; views share it.

    ``pointer``: address on the device. ``dtype``, ``shape``: as in NumPy; float16 data is held as uint16 for kernels' sake.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: object = field(repr=False, compare=False, default=None)

    @property
    def size(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def view(self, shape: Sequence[int], dtype: npt.DTypeLike | None = None, offset: int = 0) -> Buffer:
        """The same memory from ``offset`` bytes on under another shape and dtype. Raises ValueError past the end or unaligned."""
        seen = Buffer(self.pointer + offset, tuple(shape), np.dtype(dtype or self.dtype), self.owner)
        if offset < 0 or offset + seen.nbytes > self.nbytes:
            raise ValueError(f"a view of {seen.nbytes} bytes at {offset} leaves a buffer of {self.nbytes} bytes")
        if seen.pointer % seen.dtype.itemsize:
            raise ValueError(f"offset {offset} is not a multiple of {seen.dtype.itemsize} bytes")
        return seen

    def rows(self, start: int, stop: int) -> Buffer:
        """Rows ``start .. stop - 1`` of the first axis."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"rows {start}..{stop} of {self.shape[0]}")
        stride = self.nbytes // self.shape[0] if self.shape[0] else 0
        return self.view((stop - start, *self.shape[1:]), offset=start * stride)


@dataclass(frozen=True, slots=True)
class KernelName:
    """One kernel: the .cu it lives in (its stem under cuda_src/) and its C++ name there, template arguments included."""

    stem: str
    entry: str

    def __str__(self) -> str:
        return f"{self.stem}.cu: {self.entry}"


GRID_LIMITS = ((1 << 31) - 1, 65535, 65535)
"""Blocks along x, y and z that one launch can have."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything about one launch but its arguments: kernel, blocks (x, y, z), threads per block."""

    kernel: KernelName
    grid: tuple[int, int, int]
    threads: int


Argument = Buffer | Scalar


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device says about itself. ``arch``: compute capability x 10 (86), 0 for the emulated device. Bytes. ``uuid``: as nvidia-smi
    prints it."""

    name: str
    arch: int
    total_memory: int
    pci_id: str = ""
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes free and in all, as the driver counts them."""

    free: int
    total: int


class DeviceError(RuntimeError):
    """The device refused or lost work; the message says which."""


class DeviceLost(DeviceError):
    """Work has failed in a way that the device, or this stream of it, does not survive."""


class CompileError(DeviceError):
    """A kernel does not compile; the message carries the compiler's output with real file names and lines."""


class Event(Protocol):
    """A mark in a stream's work."""

    def synchronize(self) -> None:
        """Blocks the host until the work before the mark is done. An event never recorded counts as passed."""

    def query(self) -> bool:
        """True when the work before the mark is done; does not block."""


class Stream(Protocol):
    """Work in order."""

    def record(self, event: Event) -> None: ...

    def wait(self, event: Event) -> None:
        """Work enqueued from now on runs after the event, which may be of another stream or device."""

    def synchronize(self) -> None: ...


class Graph(Protocol):
    """Launches captured once, replayed with one call."""

    def replay(self, stream: Stream) -> None: ...


class Device(Protocol):
    """One GPU, real or emulated. Streams, events, buffers and graphs are used with the device that made them."""

    info: DeviceInfo

    def memory(self) -> Memory: ...

    def allocate(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Buffer:
        """Memory with undefined contents, aligned to 256 bytes. Raises DeviceError when it does not fit, or in a capture."""

    def pinned(self, shape: Sequence[int], dtype: npt.DTypeLike) -> HostArray:
        """Host memory for asynchronous copies of any device, zeroed."""

    def stream(self) -> Stream: ...

    def event(self) -> Event: ...

    def timed_event(self) -> Event:
        """An event that ``seconds_between`` takes; recording it costs a little more."""

    def seconds_between(self, start: Event, end: Event) -> float:
        """Between two timed events of this device that have passed."""

    def reach(self, peer: Device) -> bool:
        """Whether copies into the peer's memory go there directly; makes it so where the hardware can. Else they go by way of the host."""

    def upload(self, target: Buffer, source: HostArray, stream: Stream) -> None:
        """Host to device. dtype and shape must be the buffer's (TypeError, ValueError)."""

    def download(self, target: HostArray, source: Buffer, stream: Stream) -> None: ...

    def copy(self, target: Buffer, source: Buffer, stream: Stream) -> None:
        """Device to device; either end may lie on a peer. Equal sizes in bytes."""

    def compile(self, kernels: Sequence[KernelName]) -> float:
        """Makes kernels ready before the first window: compiled in parallel, from the disk cache where possible. Seconds taken."""

    def launch(self, launch: Launch, arguments: Sequence[Argument], stream: Stream) -> None:
        """Enqueues one kernel. Compiles it first if ``compile`` has not seen it."""

    def capture(self, stream: Stream) -> AbstractContextManager[Graph]:
        """``with device.capture(stream) as graph:`` records what the block enqueues on the stream instead of running it."""


def check_copy(buffer: Buffer, host: HostArray) -> None:
    """Raises TypeError or ValueError unless the host array can be copied to or from the buffer byte for byte."""
    if host.dtype != buffer.dtype or host.shape != buffer.shape:
        raise TypeError(f"copy between {host.dtype}{list(host.shape)} on the host and {buffer.dtype}{list(buffer.shape)}")
    if not host.flags.c_contiguous:
        raise ValueError("copies need a C-contiguous host array: strides are not passed on")
