"""Compiles a kernel with the host's C++ compiler into a shared library that runs it on fibers (cuda_src/include/fibers.cuh).

A model needs some dozens of instances, each takes a fraction of a second. They compile in parallel, several to a library, and are cached
one by one: each has a file of its own name, which may hold others, too. Contraction of floating point operations is off, as it is on the
GPU, so that the order of operations written in the source is the order computed on both.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from strata.devices.base import CompileError, KernelName
from strata.devices.source import cache_key, source_folder, write_atomically

LOT = 8  # kernels of a library
SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")


@lru_cache(maxsize=4)
def find_compiler(command: str | None = None) -> tuple[str, ...] | None:
    """A C++17 compiler and the arguments it always gets: ``command`` (a path, or words such as ``ccache g++``), else g++, else clang++.

    None where there is none.
    """
    for words in ((command,), command.split()) if command is not None else (("g++",), ("clang++",)):
        path = shutil.which(words[0]) if words else None
        if path:
            return (path, *words[1:])
    return None


@lru_cache(maxsize=1)
def machine_options() -> tuple[str, ...]:
    """Instruction sets worth using (FMA in one instruction); they change the speed, never a bit."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.is_file() else []
    return ("-mno-red-zone", "-mavx2", "-mfma") if "avx2" in flags and "fma" in flags else ("-mno-red-zone",)


class HostCompiler:
    """Turns kernel names into shared libraries in ``cache``. Raises CompileError where no compiler is installed.

    ``command``: as ``find_compiler`` takes it. ``sanitize``: with AddressSanitizer. ``ucontext``: fibers by the system's calls, as on
    machines that fibers.cuh does not know.
    """

    def __init__(self, cache: Path, command: str | None = None, *, sanitize: bool = False, ucontext: bool = False) -> None:
        found = find_compiler(command)
        if found is None:
            lacking = "none was found" if command is None else f"{command} was not found"
            raise CompileError(f"the emulated device needs a C++17 compiler (g++ or clang++, or --compiler); {lacking}")
        self._compiler = found
        self._cache = cache
        optimise = SANITIZE if sanitize else ("-O2",)
        self._options = (
            *optimise, "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing",
            "-Wall", "-Wno-unused-function", "-Wno-unused-variable", "-Wno-unknown-pragmas",
            "-DSTRATA_HOST", *(("-DSTRATA_UCONTEXT",) if ucontext else ()), *machine_options(),
            "-Wframe-larger-than=16384",  # half a fiber's stack: an overflow would run into the next fiber's
        )
        self._version = subprocess.run([*found, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]

    def library(self, kernel: KernelName) -> tuple[Path, str]:
        """The shared library of this kernel, compiled unless cached, and the ending of its names there: ``strata_run_`` and
        ``strata_signature_``."""
        self.build([kernel])
        key = self._key(kernel)
        return self._path(kernel.stem, key), key

    def build(self, kernels: Sequence[KernelName]) -> None:
        """Compiles what is not in the cache, several of one .cu by one process: reading the headers takes as long as a kernel does."""
        stems: dict[str, dict[str, KernelName]] = {}
        for kernel in dict.fromkeys(kernels):
            key = self._key(kernel)
            if not self._path(kernel.stem, key).is_file():
                stems.setdefault(kernel.stem, {})[key] = kernel
        cores = os.cpu_count() or 1
        size = min(LOT, max(1, sum(map(len, stems.values())) // (2 * cores)))
        lots = [dict(list(found.items())[at : at + size]) for found in stems.values() for at in range(0, len(found), size)]
        with ThreadPoolExecutor(cores) as pool:  # each thread only waits for its compiler process
            list(pool.map(self._compile, lots))

    def _key(self, kernel: KernelName) -> str:
        return cache_key(kernel.stem, (kernel.entry, *self._compiler, self._version, *self._options))

    def _path(self, stem: str, key: str) -> Path:
        return self._cache / f"{stem}-{key}.so"

    def _compile(self, kernels: Mapping[str, KernelName]) -> None:
        """One library of ``kernels``, all of one .cu, under the name of each. What fails is tried alone, so that the message names it."""
        folder = source_folder()
        (first, kernel), *others = kernels.items()
        exports = "".join(f"STRATA_EXPORT({key}, {one.entry})\n" for key, one in kernels.items())
        library = self._path(kernel.stem, first)
        library.parent.mkdir(parents=True, exist_ok=True)
        built = library.with_suffix(f".{os.getpid()}.tmp")
        command = [*self._compiler, *self._options, f"-I{folder}", f"-I{folder / 'include'}", "-x", "c++", "-", "-o", str(built)]
        result = subprocess.run(command, input=f'#include "{kernel.stem}.cu"\n{exports}', capture_output=True, text=True)
        if others and (result.returncode != 0 or result.stderr):
            for key, one in kernels.items():
                self._compile({key: one})
            return
        if result.returncode != 0:
            built.unlink(missing_ok=True)
            raise CompileError(f"{kernel} does not compile with {' '.join(self._compiler)}:\n{result.stderr}")
        if result.stderr:
            raise CompileError(f"{kernel} compiles with warnings:\n{result.stderr}")
        write_atomically(library, built.read_bytes())
        built.unlink()
        for key, one in others:
            link_or_copy(library, self._path(one.stem, key))


def link_or_copy(source: Path, target: Path) -> None:
    """``target`` is ``source``, too. Other processes see the whole file or none."""
    new = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        os.link(source, new)
        os.replace(new, target)
    except OSError:  # not every file system has links
        write_atomically(target, source.read_bytes())
