"""Kernels on the emulated device: they need a C++ compiler (marker ``cxx``) and nothing else. On a GPU: see devices.py."""

from __future__ import annotations

import numpy as np
import pytest

from strata.devices.base import KernelName
from strata.devices.host_compiler import find_compiler
from strata.kernels.experts import kernels_for
from strata.kernels.matmul import linear_name
from strata.kernels.parts import parts_name, swiglu_parts_name
from strata.weights.layouts import LAYOUTS
from tests.kernels.devices import ON_GPU, TEST_DEVICE, new_device
from tools.lint_kernels import instances

# A GPU has no part in these: they are of the emulated device, of doubles of it, of compilers and formats.
ELSEWHERE = ["device_load", "device_rates", "emulated", "hop", "lint", "nvrtc", "recode", "rehearsal", "sanitizer"]
collect_ignore = [f"test_{name}.py" for name in ELSEWHERE] if ON_GPU else []


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("cxx") and find_compiler() is None and TEST_DEVICE != "cuda":
            item.add_marker(pytest.mark.skip(reason="no C++ compiler (g++ or clang++) found"))


@pytest.fixture(scope="session", autouse=True)
def compiled_ahead(request):
    """A whole run on a cold cache would compile one kernel after the other; what every layout's tests need is compiled by all cores."""
    if len(request.session.items) < 100 or ON_GPU or find_compiler() is None:
        return
    small = ("attention", "store_heads", "rms_norm", "embed", "sample", "route", "draft", "add", "intrinsics")
    names = [KernelName(stem, entry) for stem in small for entry in instances()[stem]]
    layouts = sorted(set(LAYOUTS) - {"half"})
    names += [linear_name(layout, count) for layout in layouts for count in (1, 8)]
    names += [KernelName("matmul", f"matmul<{layout}, {tiles}>") for layout in layouts for tiles in (1, 4)]
    for count in (1, 2, 4, 8, 12, 24, 32):  # what the small models and the tests of joined products have
        names += [linear_name(layout, count) for layout in ("odd4", "super8", "affine_super8")]
        names += [linear_name(layout, count, swiglu=True) for layout in ("odd4", "super4")]
        names += [parts_name(layouts, count) for layouts in (("odd4", "super4"), ("odd4", "flat8"))]
    for pair in (("odd4", "odd4"), ("packed3", "super8"), ("affine_super8", "flat4"), ("super4", "packed3"), ("flat4", "flat8")):
        names += [swiglu_parts_name(*pair, count) for count in (1, 2, 12)]
    routed = ((256, 256), ("odd4",) * 3), ((768, 768), ("packed3", "super8", "super4")), ((256, 64), ("odd4", "odd4", "flat8"))
    for widths, three in routed:
        names += [name for count in (1, 9, 40) for name in kernels_for(three, widths, 5, 2, count)]
    new_device().compile(names)


class Bench:
    """A device and a stream with the moves every kernel test makes."""

    def __init__(self, **options):
        self.device = new_device(**options)
        self.stream = self.device.stream()

    def put(self, array):
        array = np.ascontiguousarray(array)
        buffer = self.device.allocate(array.shape, array.dtype)
        self.device.upload(buffer, array, self.stream)
        return buffer

    def empty(self, shape, dtype=np.float32):
        """Memory that says whether it was written: NaN as floats, which a GPU does not see to."""
        buffer = self.device.allocate(shape, dtype)
        if ON_GPU:
            self.device.upload(buffer.view((buffer.nbytes,), np.uint8), np.full(buffer.nbytes, 0xFF, np.uint8), self.stream)
        return buffer

    def get(self, buffer):
        array = np.zeros(buffer.shape, buffer.dtype)
        self.device.download(array, buffer, self.stream)
        self.stream.synchronize()
        return array


@pytest.fixture(scope="session", params=["gpu"] if ON_GPU else ["ascending", "descending"])
def bench(request):
    """Both orders of threads: a race between them shows as a difference from the twin in one of the two."""
    return Bench(descending=request.param == "descending")


@pytest.fixture(scope="session")
def one_bench():
    return Bench()


@pytest.fixture
def rng(request):
    """Fresh numbers in every test, the same in every run, and on a GPU those of the emulated device."""
    return np.random.default_rng(abs(hash_name(request.node.name.replace("[gpu", "[ascending"))))


def hash_name(name):
    return int.from_bytes(name.encode()[:64].ljust(8, b"\0"), "little")
