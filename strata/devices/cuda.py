"""A GPU behind the door of base.py, through CuPy (which only this file imports, and only when a device is made).

Kernels arrive as cubins from nvrtc.py and are loaded as CuPy RawKernels. CuPy checks nothing that is passed to them, so the
launchers do, and the emulated device checks the launchers. What the rest of the file takes care of:
  - the current device belongs to a host thread: every call selects this one first, at no cost where it is selected already;
  - streams never wait for the default stream (they can be captured), and launches name their stream;
  - memory is allocated outside CuPy's pool: weights and caches are allocated once and would never go back to it;
  - device to device copies say "default": unified addressing finds both ends, and the driver stages what peers cannot reach.
"""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.devices.base import Argument, Buffer, DeviceError, DeviceInfo, HostArray, KernelName, Launch, Memory, check_copy
from strata.devices.nvrtc import compile_modules
from strata.devices.source import default_cache
from strata.errors import StartError

OLDEST_ARCH = 75  # the first with integer matrix units

_selected = threading.local()


def load_cupy() -> Any:
    """CuPy, or a StartError that says how to get it."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise StartError(f"CuPy cannot be imported ({error}): install the extra cuda12 or cuda13, or use --device cpu") from error


def visible_devices() -> int:
    """How many GPUs there are to take, at least one. Raises StartError with the driver's reason where there is none."""
    runtime = load_cupy().cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except RuntimeError as error:  # CuPy's CUDARuntimeError is one
        raise StartError(f"no GPU can be used ({error}): install or update the NVIDIA driver, or use --device cpu") from error
    if not count:
        raise StartError("no GPU is visible: look at CUDA_VISIBLE_DEVICES and nvidia-smi, or use --device cpu")
    return count


def count_devices() -> int:
    """Visible GPUs; 0 where there is no CuPy, no driver or no GPU."""
    try:
        return visible_devices()
    except StartError:
        return 0


def group_by_stem(kernels: Sequence[KernelName]) -> dict[str, list[str]]:
    """stem -> its entries, each once, in order: the units that are compiled."""
    grouped: dict[str, list[str]] = {}
    for kernel in dict.fromkeys(kernels):
        grouped.setdefault(kernel.stem, []).append(kernel.entry)
    return grouped


def pack_arguments(arguments: Sequence[Argument]) -> tuple[np.generic, ...]:
    """What CuPy passes on byte for byte: NumPy scalars, a buffer as its address. Raises TypeError for anything else."""
    packed: list[np.generic] = []
    for number, argument in enumerate(arguments):
        if isinstance(argument, Buffer):
            packed.append(np.uint64(argument.pointer))
        elif isinstance(argument, (np.int32, np.int64, np.uint32, np.float32)):
            packed.append(argument)
        else:
            raise TypeError(f"kernel argument {number} is a {type(argument).__name__}: pass a Buffer or a sized NumPy scalar")
    return tuple(packed)


class CudaEvent:
    """A CUDA event without timing."""

    def __init__(self, cupy: Any) -> None:
        self.handle = cupy.cuda.Event(block=False, disable_timing=True)
        self._recorded = False

    def recorded(self) -> None:
        self._recorded = True

    def synchronize(self) -> None:
        if self._recorded:
            self.handle.synchronize()

    def query(self) -> bool:
        return not self._recorded or bool(self.handle.done)


class CudaStream:
    """A non-blocking CUDA stream."""

    def __init__(self, cupy: Any) -> None:
        self.handle = cupy.cuda.Stream(non_blocking=True)

    def record(self, event: CudaEvent) -> None:
        self.handle.record(event.handle)
        event.recorded()

    def wait(self, event: CudaEvent) -> None:
        self.handle.wait_event(event.handle)

    def synchronize(self) -> None:
        self.handle.synchronize()


class CudaGraph:
    """A captured graph, complete when its ``with`` block has ended."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.kept: list[object] = []

    def replay(self, stream: CudaStream) -> None:
        self.handle.launch(stream.handle)


class CudaDevice:
    """GPU number ``ordinal`` as CUDA counts the visible ones. Raises StartError without any, DeviceError where that one cannot serve.

    ``toolkit``: where NVRTC may be found, see nvrtc.py.
    """

    def __init__(self, ordinal: int = 0, *, cache: Path | None = None, toolkit: Path | None = None) -> None:
        self._cupy = load_cupy()
        self._runtime = self._cupy.cuda.runtime
        self._ordinal = ordinal
        self._cache, self._toolkit = cache or default_cache(), toolkit
        self._functions: dict[KernelName, Any] = {}
        self._capture: CudaGraph | None = None
        count = visible_devices()
        if ordinal >= count:
            raise DeviceError(f"no GPU {ordinal}: {count} visible, numbered from 0")
        self._select()
        facts = self._runtime.getDeviceProperties(ordinal)
        self.info = DeviceInfo(
            facts["name"].decode(), 10 * facts["major"] + facts["minor"], facts["totalGlobalMem"], self._runtime.deviceGetPCIBusId(ordinal)
        )
        if self.info.arch < OLDEST_ARCH:
            found, needed = self.info.arch / 10, OLDEST_ARCH / 10
            raise DeviceError(f"GPU {ordinal}, {self.info.name}, has compute capability {found}; the kernels need {needed} or newer")

    def _select(self) -> None:
        if getattr(_selected, "ordinal", None) != self._ordinal:
            self._runtime.setDevice(self._ordinal)
            _selected.ordinal = self._ordinal

    # ------------------------------------------------------------ memory

    def memory(self) -> Memory:
        self._select()
        return Memory(*self._runtime.memGetInfo())

    def allocate(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Buffer:
        if self._capture is not None:
            raise DeviceError("allocation while a graph is being captured")
        self._select()
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        try:
            memory = self._cupy.cuda.Memory(max(nbytes, 1))
        except RuntimeError as error:
            raise DeviceError(f"out of memory on {self.info.name}: {nbytes} bytes asked for, {self.memory().free} free") from error
        return Buffer(memory.ptr, tuple(shape), kind, memory)

    def pinned(self, shape: Sequence[int], dtype: npt.DTypeLike) -> HostArray:
        count, kind = math.prod(shape), np.dtype(dtype)
        memory = self._cupy.cuda.alloc_pinned_memory(max(count * kind.itemsize, 1))
        array: HostArray = np.frombuffer(memory, kind, count).reshape(tuple(shape))
        array[...] = 0
        return array

    # ------------------------------------------------------------ streams and copies

    def stream(self) -> CudaStream:
        self._select()
        return CudaStream(self._cupy)

    def event(self) -> CudaEvent:
        self._select()
        return CudaEvent(self._cupy)

    def upload(self, target: Buffer, source: HostArray, stream: CudaStream) -> None:
        check_copy(target, source)
        self._move(target.pointer, source.ctypes.data, target.nbytes, stream)

    def download(self, target: HostArray, source: Buffer, stream: CudaStream) -> None:
        check_copy(source, target)
        self._move(target.ctypes.data, source.pointer, source.nbytes, stream)

    def copy(self, target: Buffer, source: Buffer, stream: CudaStream) -> None:
        if target.nbytes != source.nbytes:
            raise ValueError(f"copy of {source.nbytes} bytes into {target.nbytes}")
        self._move(target.pointer, source.pointer, source.nbytes, stream)

    def _move(self, target: int, source: int, nbytes: int, stream: CudaStream) -> None:
        self._select()
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDefault, stream.handle.ptr)

    @contextmanager
    def capture(self, stream: CudaStream) -> Iterator[CudaGraph]:
        self._select()
        graph = self._capture = CudaGraph()
        stream.handle.begin_capture()
        try:
            yield graph
        finally:
            self._capture = None
            graph.handle = stream.handle.end_capture()

    # ------------------------------------------------------------ kernels

    def compile(self, kernels: Sequence[KernelName]) -> float:
        started = time.perf_counter()
        missing = [kernel for kernel in kernels if kernel not in self._functions]
        modules = compile_modules(group_by_stem(missing), f"sm_{self.info.arch}", self._cache, self._toolkit)
        self._select()
        for kernel in missing:
            module = modules[kernel.stem]
            raw = self._cupy.RawModule(path=str(module.cubin)).get_function(module.names[kernel.entry])
            self._functions[kernel] = raw.kernel  # the function as loaded on this device
        return time.perf_counter() - started

    def launch(self, launch: Launch, arguments: Sequence[Argument], stream: CudaStream) -> None:
        function = self._functions.get(launch.kernel)
        if function is None:
            self.compile([launch.kernel])
            function = self._functions[launch.kernel]
        self._select()
        if self._capture is not None:
            self._capture.kept.extend(arguments)  # a replay reads them long after the launcher has returned
        function(launch.grid, (launch.threads, 1, 1), pack_arguments(arguments), 0, stream.handle)
