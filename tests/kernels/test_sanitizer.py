"""Kernels under AddressSanitizer and UndefinedBehaviourSanitizer, in a process of their own that has the runtime loaded.

Slow (everything is compiled again), so it runs where STRATA_NIGHTLY is set. That it finds an overrun at all is part of the test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strata.devices.host_compiler import find_compiler

pytestmark = [
    pytest.mark.cxx,
    pytest.mark.skipif("STRATA_NIGHTLY" not in os.environ, reason="nightly: set STRATA_NIGHTLY=1"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sanitizer's runtime is loaded by LD_PRELOAD"),
]
ROOT = Path(__file__).parent.parent.parent
GOOD = "run('add', 'add', (1, 1, 1), [device.allocate([100], np.float32), device.allocate([100], np.float32), np.int32(100)])"
OVERRUN = GOOD.replace("np.int32(100)", "np.int32(101)")
SCRIPT = """
import numpy as np
from strata.devices.base import KernelName, Launch
from strata.devices.emulated import EmulatedDevice
device = EmulatedDevice(sanitize=True)
def run(stem, entry, grid, arguments):
    stream = device.stream()
    device.launch(Launch(KernelName(stem, entry), grid, 256), arguments, stream)
    stream.synchronize()
{}
print("done")
"""


def environment():
    runtime = subprocess.run([*find_compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    options = "detect_stack_use_after_return=0:detect_leaks=0"
    return {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": options, "STRATA_SANITIZE": "1", "PYTHONMALLOC": "malloc"}


def run(arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment(), cwd=ROOT)


def test_an_overrun_is_found():
    assert "done" in run(["-c", SCRIPT.format(GOOD)]).stdout
    result = run(["-c", SCRIPT.format(OVERRUN)])
    assert result.returncode != 0 and "heap-buffer-overflow" in result.stderr and "add.cu:" in result.stderr


@pytest.mark.parametrize("file", ["attention", "rms_norm", "sample", "parts", "matvec", "route", "experts", "draft"])
def test_kernels_stay_inside_their_buffers(file):
    result = run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/kernels/test_{file}.py"])
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
