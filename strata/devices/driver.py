"""The UUIDs of the visible GPUs, asked of NVIDIA's driver through ctypes: cuDeviceGetUuid of the driver API.

Why not CuPy's device properties: those hold the 16 bytes as a C string, which ends at the first zero byte.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Callable
from typing import Any


def load_driver() -> Any:
    """The driver's library. Raises OSError where there is none."""
    return ctypes.WinDLL("nvcuda.dll") if os.name == "nt" else ctypes.CDLL("libcuda.so.1")  # type: ignore[attr-defined,unused-ignore]


def gpu_uuids(count: int, load: Callable[[], Any] = load_driver) -> list[str]:
    """Of GPUs 0 to ``count`` - 1, as CUDA numbers the visible ones, written as nvidia-smi does (``GPU-...``); "" where none is told."""
    try:
        driver = load()
        # The second form names a slice of a GPU instead of the GPU it is a slice of.
        ask = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
        if driver.cuInit(0):
            return [""] * count
    except (OSError, AttributeError):
        return [""] * count
    found = []
    for number in range(count):
        device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        failed = driver.cuDeviceGet(ctypes.byref(device), number) or ask(raw, device)
        found.append("" if failed else f"GPU-{uuid.UUID(bytes=bytes(raw))}")
    return found
