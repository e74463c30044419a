"""Compiles kernels to cubins with NVRTC, through ctypes: no GPU, no driver and no CuPy needed, so CI and the lint do it too.

The library comes from the wheels ``nvidia-cuda-nvrtc-cu12`` / ``nvidia-cuda-nvrtc`` or a CUDA toolkit. Sources need no
CUDA headers. NVRTC serialises its work inside a process, so a cold start compiles in several: ``worker`` is what those run.

A cubin is cached beside a small JSON file with the mangled names of its entries and the seconds it took. ``-fmad=false``: a
fused multiply-add happens where the source says fmaf and nowhere else, or two kernels could round the same sum differently.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from strata.devices.base import CompileError
from strata.devices.source import cache_key, source_folder, write_atomically

OPTIONS = ("-std=c++17", "-fmad=false")
# The first argument is the folder of this package, which need not be installed.
WORKER = "import sys; sys.path.insert(0, sys.argv.pop(1)); from strata.devices.nvrtc import worker; sys.exit(worker(*sys.argv[1:]))"
TOOLKIT = Path("/usr/local/cuda")
LIBRARY_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll")


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled .cu: the cubin's file and the mangled name of each entry."""

    cubin: Path
    names: Mapping[str, str]
    seconds: float


def _candidates(toolkit: Path) -> Iterator[str]:
    """Full paths first (wheels, then the toolkit), then what the system's loader finds."""
    folders = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        folders += [Path(root) / part for part in ("cu13/lib", "cuda_nvrtc/lib", "cu13/bin/x86_64", "cuda_nvrtc/bin")]
    folders += [toolkit / "lib64", toolkit / "bin"]
    yield from (str(folder / name) for folder in folders for name in LIBRARY_NAMES if (folder / name).is_file())
    yield from LIBRARY_NAMES


@lru_cache(maxsize=4)
def load_library(toolkit: Path | None = None) -> Any | None:
    """NVRTC as a ctypes library, or None where it is not installed. ``toolkit``: the folder of a CUDA toolkit to look into."""
    for path in _candidates(toolkit or TOOLKIT):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def version(toolkit: Path | None = None) -> str:
    """NVRTC's version, "12.9". Raises CompileError where it is not installed."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(_found(toolkit), "nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _found(toolkit: Path | None) -> Any:
    library = load_library(toolkit)
    if library is None:
        raise CompileError("NVRTC was not found: install the extra cuda12 or cuda13, or name a toolkit with --cuda-toolkit")
    return library


def _call(library: Any, name: str, *arguments: Any) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        describe = library.nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        raise CompileError(f"{name}: {describe(status).decode()}")


def _text(library: Any, program: ctypes.c_void_p, what: str) -> bytes:
    """One of the program's outputs: its log or its cubin."""
    size = ctypes.c_size_t()
    _call(library, f"nvrtcGet{what}Size", program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    _call(library, f"nvrtcGet{what}", program, room)
    return room.raw


def compile_cubin(stem: str, entries: Sequence[str], arch: str, toolkit: Path | None = None) -> tuple[bytes, dict[str, str]]:
    """The cubin of these entries of ``stem``.cu for ``arch`` ("sm_90") and their mangled names. Raises CompileError with the log."""
    library, folder, program = _found(toolkit), source_folder(), ctypes.c_void_p()
    text = f'#include "{stem}.cu"\n'.encode()
    _call(library, "nvrtcCreateProgram", ctypes.byref(program), text, f"{stem}.entries".encode(), 0, None, None)
    try:
        for entry in entries:
            _call(library, "nvrtcAddNameExpression", program, entry.encode())
        options = [*OPTIONS, f"-arch={arch}", f"-I{folder}", f"-I{folder / 'include'}"]
        try:
            _call(library, "nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
        except CompileError as error:
            log = _text(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise CompileError(f"{stem}.cu does not compile for {arch} ({error}):\n{log}") from None
        return _text(library, program, "CUBIN"), {entry: _lowered(library, program, entry) for entry in entries}
    finally:
        _call(library, "nvrtcDestroyProgram", ctypes.byref(program))


def _lowered(library: Any, program: ctypes.c_void_p, entry: str) -> str:
    name = ctypes.c_char_p()
    _call(library, "nvrtcGetLoweredName", program, entry.encode(), ctypes.byref(name))
    return (name.value or b"").decode()


def compile_modules(
    wanted: Mapping[str, Sequence[str]], arch: str, cache: Path, toolkit: Path | None = None
) -> dict[str, Module]:
    """stem -> entries becomes stem -> Module: cached ones are read, the others compiled in parallel processes.

    Raises CompileError with the compiler's output for the first source that fails.
    """
    compiler = (version(toolkit), *OPTIONS)
    targets = {stem: cache / f"{stem}-{arch}-{cache_key(stem, (*compiler, *sorted(entries)))}" for stem, entries in wanted.items()}
    missing = [stem for stem, target in targets.items() if not target.with_suffix(".json").is_file()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each thread waits for one process
        list(pool.map(lambda stem: _spawn(arch, targets[stem], toolkit, (stem, *sorted(wanted[stem]))), missing))
    return {stem: _read(target) for stem, target in targets.items()}


def _read(target: Path) -> Module:
    facts = json.loads(target.with_suffix(".json").read_text())
    return Module(target.with_suffix(".cubin"), facts["names"], facts["seconds"])


def _spawn(arch: str, target: Path, toolkit: Path | None, wanted: Sequence[str]) -> None:
    """Compile ``wanted``, a stem and its entries, in a process of its own."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    command = [sys.executable, "-c", WORKER, root, arch, str(target), str(toolkit or TOOLKIT), *wanted]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise CompileError(result.stderr.strip() or f"compiling {wanted[0]}.cu ended with status {result.returncode}")


def worker(arch: str, target: str, toolkit: str, stem: str, *entries: str) -> int:
    """The body of a compiling process: writes TARGET.cubin and TARGET.json. Returns the exit status, errors on stderr."""
    started = time.perf_counter()
    try:
        cubin, names = compile_cubin(stem, entries, arch, Path(toolkit))
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    write_atomically(Path(target).with_suffix(".cubin"), cubin)
    facts = {"names": names, "seconds": round(time.perf_counter() - started, 3)}
    write_atomically(Path(target).with_suffix(".json"), json.dumps(facts).encode())  # last: its presence says that both are there
    return 0
