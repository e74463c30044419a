"""What NVIDIA's management library says of a GPU: memory, utilisation, temperature, power. Through ctypes; no package is needed.

The library comes with the driver. It needs no CUDA context and touches no stream, so it may be asked while windows run; but a
driver may take milliseconds over an answer, so not on a thread that must be quick. Structures and functions as in nvml.h.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
TEMPERATURE_GPU = 0


class _Memory(ctypes.Structure):
    """nvmlMemory_t: bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: percent of the last sampling period."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU now; None for what it does not say (a slice of a GPU has no utilisation). Bytes, a share from 0 to 1, degrees C, W."""

    total_memory: int | None = None
    free_memory: int | None = None
    utilization: float | None = None
    temperature: float | None = None
    power: float | None = None


class Nvml:
    """The library, initialised. ``library`` is what ctypes loaded; one thread at a time."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles: dict[str, ctypes.c_void_p] = {}

    @classmethod
    def open(cls, path: str = LIBRARY) -> Nvml | None:
        """None where there is no driver, or it does not answer."""
        try:
            library = ctypes.CDLL(path)
            return cls(library) if library.nvmlInit_v2() == 0 else None
        except (OSError, AttributeError):
            return None

    def read(self, pci_id: str) -> GpuReading:
        """The GPU at ``pci_id`` (0000:65:00.0)."""
        gpu = self._handle(pci_id)
        if gpu is None:
            return GpuReading()
        memory, utilization, temperature, power = _Memory(), _Utilization(), ctypes.c_uint(), ctypes.c_uint()
        has_memory = self._ask("nvmlDeviceGetMemoryInfo", gpu, ctypes.byref(memory))
        has_use = self._ask("nvmlDeviceGetUtilizationRates", gpu, ctypes.byref(utilization))
        has_temperature = self._ask("nvmlDeviceGetTemperature", gpu, TEMPERATURE_GPU, ctypes.byref(temperature))
        has_power = self._ask("nvmlDeviceGetPowerUsage", gpu, ctypes.byref(power))  # milliwatts
        return GpuReading(
            memory.total if has_memory else None,
            memory.free if has_memory else None,
            utilization.gpu / 100 if has_use else None,
            float(temperature.value) if has_temperature else None,
            power.value / 1000 if has_power else None,
        )

    def _handle(self, pci_id: str) -> ctypes.c_void_p | None:
        if pci_id not in self._handles:
            handle = ctypes.c_void_p()
            if not self._ask("nvmlDeviceGetHandleByPciBusId_v2", pci_id.encode(), ctypes.byref(handle)):
                return None
            self._handles[pci_id] = handle
        return self._handles[pci_id]

    def _ask(self, name: str, *arguments: Any) -> bool:
        """Whether the call gave an answer; an old driver may lack it."""
        function = getattr(self._library, name, None)
        return function is not None and function(*arguments) == 0
