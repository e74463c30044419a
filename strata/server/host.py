"""What the system says about the machine: its memory, on Linux."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
KINDS = {"MemTotal": "total", "MemAvailable": "available"}


def memory_bytes(path: Path = MEMINFO) -> dict[str, float]:
    """``total`` and ``available`` bytes; empty where there is no such file. One read of a few lines: fit for the loop's thread."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    values = (line.split() for line in lines)
    return {KINDS[name.rstrip(":")]: float(number) * 1024 for name, number, *_ in values if name.rstrip(":") in KINDS}
