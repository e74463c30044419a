"""What this process may use of the machine: processors and memory, limits of its container included.

Why not just os.cpu_count() and the installed memory: in a container both name the host's, and a server that believes them runs 64
threads on a quota of two processors, or is killed for memory that it was never given. Only Linux has such limits (cgroups, v2).
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def processors(cgroups: Path = CGROUPS, proc: Path = PROC) -> int:
    """Processors that this process may use, at least one: its affinity, and its container's quota rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in own_cgroups(cgroups, proc):
        quota, _, period = read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            allowed = min(allowed, -(-int(quota) // int(period)))
    return max(1, allowed)


def free_memory(cgroups: Path = CGROUPS, proc: Path = PROC) -> int | None:
    """Bytes that can be allocated without swapping; None where the system does not say."""
    if sys.platform == "win32":
        return windows_free_memory()
    free = [int(words[1]) * 1024 for line in read(proc / "meminfo").splitlines() if (words := line.split())[:1] == ["MemAvailable:"]]
    for folder in own_cgroups(cgroups, proc):
        limit, used = read(folder / "memory.max").strip(), read(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            free.append(max(0, int(limit) - int(used) + reclaimable(folder)))
    if free:
        return min(free)
    try:
        # No word on what is free (macOS): half of what is installed.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError):
        return None


def own_cgroups(cgroups: Path, proc: Path) -> list[Path]:
    """The folders of this process's cgroup and of its parents; a limit of any of them binds."""
    names = [line[3:] for line in read(proc / "self" / "cgroup").splitlines() if line.startswith("0::")]
    own = cgroups / names[0].lstrip("/") if names and ".." not in names[0] else cgroups
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(cgroups)]


def reclaimable(folder: Path) -> int:
    """Bytes of file cache that a cgroup counts as used but gives back under pressure (a mapped model file, above all)."""
    lines = (line.split() for line in read(folder / "memory.stat").splitlines())
    return sum(int(words[1]) for words in lines if len(words) == 2 and words[0] in ("active_file", "inactive_file"))


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def windows_free_memory() -> int | None:
    """``ullAvailPhys`` of MEMORYSTATUSEX: two 32-bit and seven 64-bit fields; it is the second of the latter."""
    status = (ctypes.c_uint64 * 8)()
    status[0] = ctypes.sizeof(status)  # dwLength, the low half of the first eight bytes
    kernel = getattr(ctypes, "windll").kernel32
    return int(status[2]) if kernel.GlobalMemoryStatusEx(ctypes.byref(status)) else None
