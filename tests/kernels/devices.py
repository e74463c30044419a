"""The device that kernel tests run on: emulated, or with STRATA_TEST_DEVICE=cuda the machine's GPU (tools/device_check.py)."""

from __future__ import annotations

import os
from functools import lru_cache

from strata.devices.base import KernelName
from strata.devices.cuda import CudaDevice
from strata.devices.emulated import EmulatedDevice
from tools.lint_kernels import instances

ON_GPU = os.environ.get("STRATA_TEST_DEVICE") == "cuda"


@lru_cache(maxsize=1)
def gpu() -> CudaDevice:
    """Opened once, every kernel compiled: one after the other, in processes of their own, they would take minutes."""
    device = CudaDevice()
    device.compile([KernelName(stem, entry) for stem, entries in instances().items() for entry in entries])
    return device


def new_device(**options) -> EmulatedDevice | CudaDevice:
    """``options`` are those of the emulated device. STRATA_SANITIZE: see test_sanitizer.py."""
    return gpu() if ON_GPU else EmulatedDevice(sanitize="STRATA_SANITIZE" in os.environ, **options)
