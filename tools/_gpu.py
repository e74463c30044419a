"""Whether this machine has an NVIDIA GPU, and which extra of setup.cfg its driver can run. Standard library only.

The driver is asked itself, through its own library: it needs no toolkit, and what it says is what CuPy will get to hear. A driver runs
programs of its own CUDA version and older ones, so the newest extra that it covers is taken.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

EXTRAS = ((13000, "cuda13"), (12000, "cuda12"))  # CUDA version as the driver counts it: 1000 * major + 10 * minor


def load_driver() -> Any:
    """The driver's library. Raises OSError where there is none."""
    return ctypes.WinDLL("nvcuda.dll") if os.name == "nt" else ctypes.CDLL("libcuda.so.1")  # type: ignore[attr-defined,unused-ignore]


def find_extra(load: Callable[[], Any] = load_driver) -> tuple[str | None, str]:
    """The extra to install, None where no GPU can be used, and what was found in words."""
    try:
        driver = load()
    except OSError:
        return None, "no NVIDIA driver found"
    version, count = ctypes.c_int(), ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None, "the NVIDIA driver does not answer"
    spoken = f"NVIDIA driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status or not count.value:
        return None, f"{spoken}, but no GPU to use" + (f" (error {status})" if status else "")
    gpus = f"{count.value} {'GPU' if count.value == 1 else 'GPUs'}"
    extra = next((name for least, name in EXTRAS if version.value >= least), None)
    if extra is None:
        return None, f"{spoken} and {gpus}: too old, update the driver for CUDA 12 or newer"
    return extra, f"{spoken} and {gpus}: taking the extra {extra}"
