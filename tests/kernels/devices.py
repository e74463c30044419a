"""The device that kernel tests run on, as STRATA_TEST_DEVICE says: emulated (the default), cuda (the machine's GPU, tools/device_check.py),
or plain: the emulated device as a GPU looks to a test, so that the run on a GPU can be rehearsed without one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy.typing as npt

from strata.devices.base import Buffer, Device, KernelName
from strata.devices.cuda import CudaDevice
from strata.devices.emulated import EmulatedDevice
from tools.lint_kernels import instances

TEST_DEVICE = os.environ.get("STRATA_TEST_DEVICE", "emulated")
ON_GPU = TEST_DEVICE != "emulated"
ENGINE_DEVICE = "cuda" if TEST_DEVICE == "cuda" else "emulated"
"""For the settings of an engine that opens its device itself."""
VERBS = {name for name in vars(Device) if not name.startswith("_")}


class PlainDevice:
    """The verbs of base.Device and no more, and memory that nobody has poisoned."""

    def __init__(self) -> None:
        self._device = EmulatedDevice()
        self.info = self._device.info

    def __getattr__(self, name: str) -> Any:
        if name not in VERBS:
            raise AttributeError(f"a GPU has no {name}")
        return getattr(self._device, name)

    def allocate(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Buffer:
        buffer = self._device.allocate(shape, dtype)
        buffer.owner.storage[...] = 0  # type: ignore[attr-defined]
        return buffer


@lru_cache(maxsize=1)
def gpu() -> CudaDevice | PlainDevice:
    """Opened once, every kernel compiled: one after the other, in processes of their own, they would take minutes."""
    if TEST_DEVICE == "plain":
        return PlainDevice()
    device = CudaDevice()
    device.compile([KernelName(stem, entry) for stem, entries in instances().items() for entry in entries])
    return device


def new_device(**options: Any) -> EmulatedDevice | CudaDevice | PlainDevice:
    """``options`` are those of the emulated device. STRATA_SANITIZE: see test_sanitizer.py."""
    return gpu() if ON_GPU else EmulatedDevice(sanitize="STRATA_SANITIZE" in os.environ, **options)
