"""NVML's reader against a library in C with the signatures and structures of nvml.h: what it says arrives, what it lacks is None."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from strata.devices.host_compiler import find_compiler
from strata.devices.nvml import GpuReading, Nvml

SOURCE = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct nvmlDevice_st *nvmlDevice_t;
typedef int nvmlReturn_t;
static char first, second;
nvmlReturn_t nvmlInit_v2(void) { return INIT; }
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device) {
    *device = (nvmlDevice_t)(strcmp(bus, "0000:65:00.0") ? &second : &first);
    return strncmp(bus, "0000:", 5) ? 6 : 0;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    memory->total = 85899345920ull; memory->free = 30000000001ull; memory->used = 55899345919ull;
    return 0;
}
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    rates->gpu = 87; rates->memory = 12;
    return device == (nvmlDevice_t)&second ? 3 : 0;  /* NVML_ERROR_NOT_SUPPORTED */
}
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *degrees) {
    *degrees = 61;
    return sensor ? 2 : 0;
}
"""
POWER = "nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *mw) { *mw = 312500; return 0; }\n"


def built(folder: Path, *, init: int = 0, power: str = POWER) -> str:
    """The path of such a library."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler (g++ or clang++) found")
    source, library = folder / "nvml.c", folder / "nvml.so"
    source.write_text(SOURCE.replace("INIT", str(init)) + power, encoding="ascii")
    subprocess.run([*compiler, "-x", "c", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=120)
    return str(library)


def test_what_the_library_says_arrives(tmp_path: Path) -> None:
    nvml = Nvml.open(built(tmp_path))
    assert nvml is not None
    assert nvml.read("0000:65:00.0") == GpuReading(85899345920, 30000000001, 0.87, 61.0, 312.5)
    assert nvml.read("0000:B3:00.0") == GpuReading(85899345920, 30000000001, None, 61.0, 312.5)
    assert nvml.read("elsewhere") == GpuReading()


def test_an_old_driver_lacks_a_function(tmp_path: Path) -> None:
    nvml = Nvml.open(built(tmp_path, power=""))
    assert nvml is not None and nvml.read("0000:65:00.0") == GpuReading(85899345920, 30000000001, 0.87, 61.0, None)


def test_no_library_and_one_that_does_not_start_are_none(tmp_path: Path) -> None:
    assert Nvml.open(str(tmp_path / "none.so")) is None
    assert Nvml.open(built(tmp_path, init=9)) is None
