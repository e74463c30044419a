"""A GPU behind the door of base.py, through CuPy (which only this file imports, and only when a device is made).

Kernels arrive as cubins from nvrtc.py and are loaded as CuPy RawKernels. CuPy checks nothing that is passed to them, so the
launchers do, and the emulated device checks the launchers. Streams, events, graphs and errors are in cuda_stream.py. What the rest of
the file takes care of:
  - memory is allocated outside CuPy's pools: weights and caches are allocated once and would never go back to one, and the pool of
    pinned memory rounds up to powers of two;
  - copies say "default": unified addressing finds both ends, and the driver stages between peers that do not reach each other;
  - kernels are loaded when they are compiled: CUDA else loads a kernel at its first launch, which might be within a capture.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.devices.base import Argument, Buffer, DeviceError, DeviceInfo, HostArray, KernelName, Launch, Memory, check_copy
from strata.devices.cuda_stream import Context, CudaEvent, CudaGraph, CudaStream, on_device
from strata.devices.driver import gpu_uuids
from strata.devices.nvrtc import Module, compile_modules
from strata.devices.source import default_cache
from strata.errors import StartError

OLDEST_ARCH = 75  # the first with integer matrix units
OUT_OF_MEMORY, PEER_ACCESS_ALREADY_ENABLED = 2, 704  # cudaError_t


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


class CudaDevice:
    """GPU number ``ordinal`` as CUDA counts the visible ones. Raises StartError without any, DeviceError where that one cannot serve.

    ``toolkit``: where NVRTC may be found, see nvrtc.py.
    """

    def __init__(self, ordinal: int = 0, *, cache: Path | None = None, toolkit: Path | None = None) -> None:
        cupy = load_cupy()
        self._runtime = cupy.cuda.runtime
        self._cache, self._toolkit = cache or default_cache(), toolkit
        self._functions: dict[KernelName, Any] = {}
        count = visible_devices()
        if ordinal >= count:
            raise DeviceError(f"no GPU {ordinal}: {count} visible, numbered from 0")
        self.context = Context(cupy, ordinal, f"GPU {ordinal}")
        self.info = self._ask()
        self.context.name = f"{self.info.name} {self.info.pci_id}"
        if self.info.arch < OLDEST_ARCH:
            found, needed = self.info.arch / 10, OLDEST_ARCH / 10
            raise DeviceError(f"GPU {ordinal}, {self.info.name}, has compute capability {found}; the kernels need {needed} or newer")

    @on_device
    def _ask(self) -> DeviceInfo:
        ordinal = self.context.ordinal
        facts = self._runtime.getDeviceProperties(ordinal)
        arch, uuid = 10 * facts["major"] + facts["minor"], gpu_uuids(ordinal + 1)[ordinal]
        return DeviceInfo(facts["name"].decode(), arch, facts["totalGlobalMem"], self._runtime.deviceGetPCIBusId(ordinal), uuid)

    # ------------------------------------------------------------ memory

    @on_device
    def memory(self) -> Memory:
        return Memory(*self._runtime.memGetInfo())

    @on_device
    def allocate(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Buffer:
        if self.context.is_capturing:
            raise DeviceError("allocation while a graph is being captured")
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        try:
            memory = self.context.cupy.cuda.Memory(max(nbytes, 1))
        except RuntimeError as error:
            if getattr(error, "status", None) != OUT_OF_MEMORY:
                raise
            free = self._runtime.memGetInfo()[0]
            raise DeviceError(f"out of memory on {self.context.name}: {nbytes} bytes asked for, {free} free") from error
        return Buffer(memory.ptr, tuple(shape), kind, memory)

    @on_device
    def pinned(self, shape: Sequence[int], dtype: npt.DTypeLike) -> HostArray:
        cuda, count, kind = self.context.cupy.cuda, math.prod(shape), np.dtype(dtype)
        memory = cuda.PinnedMemory(max(count * kind.itemsize, 1), self._runtime.hostAllocPortable)
        array: HostArray = np.frombuffer(cuda.PinnedMemoryPointer(memory, 0), kind, count).reshape(tuple(shape))
        array[...] = 0
        return array

    # ------------------------------------------------------------ streams and copies

    def stream(self) -> CudaStream:
        return CudaStream(self.context)

    def event(self) -> CudaEvent:
        return CudaEvent(self.context)

    def timed_event(self) -> CudaEvent:
        return CudaEvent(self.context, timed=True)

    @on_device
    def seconds_between(self, start: CudaEvent, end: CudaEvent) -> float:
        return float(self._runtime.eventElapsedTime(start.handle.ptr, end.handle.ptr)) / 1e3

    @on_device
    def reach(self, peer: object) -> bool:
        if not isinstance(peer, CudaDevice):
            return False
        here, there = self.context.ordinal, peer.context.ordinal
        if here == there:
            return True
        if not self._runtime.deviceCanAccessPeer(here, there):
            return False
        try:
            self._runtime.deviceEnablePeerAccess(there)
        except RuntimeError as error:
            if getattr(error, "status", None) != PEER_ACCESS_ALREADY_ENABLED:
                raise
        return True

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

    @on_device
    def _move(self, target: int, source: int, nbytes: int, stream: CudaStream) -> None:
        if nbytes:
            self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDefault, stream.handle.ptr)

    def capture(self, stream: CudaStream) -> AbstractContextManager[CudaGraph]:
        return stream.capture()

    # ------------------------------------------------------------ kernels

    def compile(self, kernels: Sequence[KernelName]) -> float:
        started = time.perf_counter()
        missing = [kernel for kernel in kernels if kernel not in self._functions]
        modules = compile_modules(group_by_stem(missing), f"sm_{self.info.arch}", self._cache, self._toolkit)
        self._load(modules, missing)
        return time.perf_counter() - started

    @on_device
    def _load(self, modules: Mapping[str, Module], kernels: Sequence[KernelName]) -> None:
        loaded = {stem: self.context.cupy.RawModule(path=str(module.cubin)) for stem, module in modules.items()}
        for kernel in kernels:
            raw = loaded[kernel.stem].get_function(modules[kernel.stem].names[kernel.entry])
            raw.num_regs  # a question about a function that only a loaded one can answer
            self._functions[kernel] = raw.kernel  # the function as loaded on this device

    def launch(self, launch: Launch, arguments: Sequence[Argument], stream: CudaStream) -> None:
        if launch.kernel not in self._functions:
            if self.context.is_capturing:
                raise DeviceError(f"{launch.kernel} would be compiled while a graph is being captured")
            self.compile([launch.kernel])
        if stream.graph is not None:
            stream.graph.kept.extend(arguments)  # a replay reads them long after the launcher has returned
        self._enqueue(launch, pack_arguments(arguments), stream)

    @on_device
    def _enqueue(self, launch: Launch, packed: tuple[np.generic, ...], stream: CudaStream) -> None:
        self._functions[launch.kernel](launch.grid, (launch.threads, 1, 1), packed, 0, stream.handle)
