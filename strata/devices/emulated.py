"""A device without a GPU: kernels compiled by the host's C++ compiler, every CUDA thread a fiber, memory plain host memory.

It is made to find mistakes, not to be fast (about 0.3 G weight x row products a second):
  - work is done late: a stream runs nothing before somebody waits for it, so a host buffer reused or read too early, or a
    missing wait between two streams, gives wrong results here every time and not once in a thousand runs on a GPU;
  - allocations are filled with 0xff (NaN), shared memory before every block too;
  - a launch is checked against the kernel's parameter list, which a GPU would not do: count, kind and element type;
  - a graph records launches, and during its capture allocating, waiting, or a kernel that is not compiled yet raises, as with CUDA;
  - ``descending`` runs the threads the other way round, ``sanitize`` compiles with AddressSanitizer (the process must have
    loaded its runtime: see tests/kernels/test_sanitizer.py).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strata.devices.base import (
    GRID_LIMITS, Argument, Buffer, DeviceError, DeviceInfo, DeviceLost, HostArray, KernelName, Launch, Memory, check_copy,
)  # fmt: skip
from strata.devices.host_compiler import HostCompiler
from strata.devices.source import default_cache

STACKS_BYTES = 1024 * (32 * 1024 + 320)  # fibers.cuh: MAX_THREADS * STACK_BYTES
MAX_THREADS = 1024
# The fibers' state is global in each library, and streams wait for each other: one thread at a time runs work, of whatever device.
RUN_LOCK = threading.RLock()

Work = Callable[[], None]


class _LaunchRecord(ctypes.Structure):
    """fibers.cuh: struct Launch."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32),
        ("descending", ctypes.c_uint32),
        ("stacks", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
    ]


class _Entry(NamedTuple):
    """A loaded kernel and its parameters: ("r" | "w" | "", dtype), read-only pointer, pointer or scalar."""

    run: Any
    parameters: tuple[tuple[str, np.dtype[Any]], ...]


@dataclass(eq=False)
class EmulatedEvent:
    """Knows the stream it was recorded on; waiting for it is what makes that stream run. ``passed_at``: seconds on the host's clock."""

    stream: EmulatedStream | None = None
    mark: int = 0
    passed_at: float = 0.0

    def pass_by(self) -> None:
        self.passed_at = time.perf_counter()

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_until(self.mark)

    def query(self) -> bool:
        return self.stream is None or self.stream.num_done >= self.mark


class EmulatedStream:
    """A queue of work that runs when waited for, in whichever thread waits. ``captured``: where work goes during a capture.

    A stream whose work has failed reports that for good, as a device of CUDA does.
    """

    def __init__(self) -> None:
        self.captured: list[Work] | None = None
        self.num_done = 0
        self._queue: list[Work] = []
        self._num_taken = 0
        self._lock = threading.Lock()
        self._error: DeviceLost | None = None

    def enqueue(self, work: Work) -> int:
        """The number of the work, which ``run_until`` takes. During a capture nothing is numbered."""
        if self.captured is not None:
            self.captured.append(work)
            return 0
        with self._lock:
            self._queue.append(work)
            return self._num_taken + len(self._queue)

    def record(self, event: EmulatedEvent) -> None:
        event.stream, event.mark = self, self.enqueue(event.pass_by)

    def wait(self, event: EmulatedEvent) -> None:
        stream, mark = event.stream, event.mark
        if stream is not None and stream is not self:
            self.enqueue(lambda: stream.run_until(mark))

    def synchronize(self) -> None:
        with self._lock:
            mark = self._num_taken + len(self._queue)
        self.run_until(mark)

    def run_until(self, mark: int) -> None:
        if self.captured is not None:
            raise DeviceError("waiting for a stream while it is being captured")
        with RUN_LOCK:
            while self._error is None and self.num_done < mark:
                with self._lock:
                    work = self._queue.pop(0)
                    self._num_taken += 1
                try:
                    work()
                except DeviceLost as error:
                    self._error = error
                self.num_done += 1
            if self._error is not None:
                raise self._error


class EmulatedGraph:
    """The recorded work of one capture."""

    def __init__(self) -> None:
        self.work: list[Work] = []

    def replay(self, stream: EmulatedStream) -> None:
        for work in self.work:
            stream.enqueue(work)


class EmulatedDevice:
    """See the head of the file. ``compiled``: so far. ``memory_limit``: bytes that can be allocated in all, so that plans can be tested;
    ``compiler``, ``ucontext``: see host_compiler.py."""

    def __init__(
        self, *, cache: Path | None = None, compiler: str | None = None, descending: bool = False, sanitize: bool = False,
        ucontext: bool = False, memory_limit: int = 1 << 34,
    ) -> None:  # fmt: skip
        self.info = DeviceInfo("emulated", 0, memory_limit)
        self.num_launches = 0
        self._compiler = HostCompiler(cache or default_cache(), compiler, sanitize=sanitize, ucontext=ucontext)
        self._entries: dict[KernelName, _Entry] = {}
        self.compiled: set[KernelName] = set()
        self._descending = descending
        self._used = 0
        self._capturing = threading.local()
        self._stacks = np.empty(STACKS_BYTES, np.uint8)

    # ------------------------------------------------------------ memory

    def memory(self) -> Memory:
        return Memory(self.info.total_memory - self._used, self.info.total_memory)

    def allocate(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Buffer:
        if getattr(self._capturing, "now", False):
            raise DeviceError("allocation while a graph is being captured")
        storage = np.empty(tuple(shape), dtype)
        if self._used + storage.nbytes > self.info.total_memory:
            raise DeviceError(f"out of memory: {storage.nbytes} bytes asked for, {self.memory().free} free")
        storage.view(np.uint8).reshape(-1)[...] = 0xFF
        self._used += storage.nbytes
        return Buffer(storage.ctypes.data, storage.shape, storage.dtype, _Owner(self, storage))

    def _release(self, nbytes: int) -> None:
        self._used -= nbytes

    def pinned(self, shape: Sequence[int], dtype: npt.DTypeLike) -> HostArray:
        return np.zeros(tuple(shape), dtype)

    # ------------------------------------------------------------ streams and copies

    def stream(self) -> EmulatedStream:
        return EmulatedStream()

    def event(self) -> EmulatedEvent:
        return EmulatedEvent()

    def timed_event(self) -> EmulatedEvent:
        return EmulatedEvent()

    def seconds_between(self, start: EmulatedEvent, end: EmulatedEvent) -> float:
        return end.passed_at - start.passed_at

    def reach(self, peer: object) -> bool:
        return isinstance(peer, EmulatedDevice)

    def upload(self, target: Buffer, source: HostArray, stream: EmulatedStream) -> None:
        check_copy(target, source)
        stream.enqueue(lambda: _move(target.pointer, source.ctypes.data, target.nbytes, (target, source)))

    def download(self, target: HostArray, source: Buffer, stream: EmulatedStream) -> None:
        check_copy(source, target)
        stream.enqueue(lambda: _move(target.ctypes.data, source.pointer, source.nbytes, (target, source)))

    def copy(self, target: Buffer, source: Buffer, stream: EmulatedStream) -> None:
        if target.nbytes != source.nbytes:
            raise ValueError(f"copy of {source.nbytes} bytes into {target.nbytes}")
        stream.enqueue(lambda: _move(target.pointer, source.pointer, source.nbytes, (target, source)))

    @contextmanager
    def capture(self, stream: EmulatedStream) -> Iterator[EmulatedGraph]:
        graph = EmulatedGraph()
        stream.captured, self._capturing.now = graph.work, True
        try:
            yield graph
        finally:
            stream.captured, self._capturing.now = None, False

    # ------------------------------------------------------------ kernels

    def compile(self, kernels: Sequence[KernelName]) -> float:
        started = time.perf_counter()
        self._compiler.build(kernels)
        self.compiled |= set(kernels)
        return time.perf_counter() - started

    def launch(self, launch: Launch, arguments: Sequence[Argument], stream: EmulatedStream) -> None:
        if stream.captured is not None and launch.kernel not in self.compiled:
            raise DeviceError(f"{launch.kernel} would be compiled while a graph is being captured")
        entry = self._entry(launch.kernel)
        fits = min(launch.grid) >= 1 and all(blocks <= most for blocks, most in zip(launch.grid, GRID_LIMITS))
        if launch.threads % 32 or not 32 <= launch.threads <= MAX_THREADS or not fits:
            raise DeviceError(f"{launch.kernel}: bad launch of {launch.grid} blocks of {launch.threads} threads")
        values = _check_arguments(launch.kernel, entry, arguments)
        self.num_launches += 1
        stream.enqueue(lambda: self._run(launch, entry, values, arguments))

    def _entry(self, kernel: KernelName) -> _Entry:
        entry = self._entries.get(kernel)
        if entry is None:
            path, ending = self._compiler.library(kernel)
            library = ctypes.CDLL(str(path))
            signature, run = library[f"strata_signature_{ending}"], library[f"strata_run_{ending}"]
            signature.restype = ctypes.c_char_p
            codes = signature().decode().split()
            parameters = tuple((code[0] if len(code) == 3 else "", np.dtype(code[-2:])) for code in codes)
            entry = self._entries[kernel] = _Entry(run, parameters)
            self.compiled.add(kernel)
        return entry

    def _run(self, launch: Launch, entry: _Entry, values: Sequence[ctypes.Array[Any]], keep: Sequence[Argument]) -> None:
        message = ctypes.create_string_buffer(256)
        record = _LaunchRecord(
            launch.grid, launch.threads, int(self._descending), self._stacks.ctypes.data, ctypes.addressof(message)
        )
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        if entry.run(ctypes.byref(record), pointers):
            raise DeviceLost(f"{launch.kernel}: {message.value.decode()}")


class _Owner:
    """Gives an allocation's bytes back to the device's account when the last view of it is gone."""

    def __init__(self, device: EmulatedDevice, storage: HostArray) -> None:
        self._release, self.storage = device._release, storage

    def __del__(self) -> None:
        self._release(self.storage.nbytes)


def _move(target: int, source: int, nbytes: int, keep: object) -> None:
    ctypes.memmove(target, source, nbytes)


def _check_arguments(kernel: KernelName, entry: _Entry, arguments: Sequence[Argument]) -> list[ctypes.Array[Any]]:
    """The arguments' bytes, one array each. Raises TypeError where one does not fit the kernel's parameter."""
    if len(arguments) != len(entry.parameters):
        raise TypeError(f"{kernel} takes {len(entry.parameters)} arguments, {len(arguments)} were given")
    values = []
    for number, (argument, (kind, dtype)) in enumerate(zip(arguments, entry.parameters)):
        if isinstance(argument, Buffer) != bool(kind) or argument.dtype != dtype:
            wanted = f"a buffer of {dtype}" if kind else str(dtype)
            raise TypeError(f"{kernel}: argument {number} must be {wanted}, not {type(argument).__name__} of {argument.dtype}")
        raw = argument.pointer.to_bytes(8, "little") if isinstance(argument, Buffer) else argument.tobytes()
        values.append((ctypes.c_char * len(raw)).from_buffer_copy(raw))
    return values
