"""The CUDA device against the same expectations as the emulated one. Runs only where there is a GPU."""

import numpy as np
import pytest

from strata.devices.cuda import CudaDevice, count_devices
from strata.devices.emulated import EmulatedDevice
from strata.devices.host_compiler import find_compiler
from strata.kernels.intrinsics import KERNEL, intrinsics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_devices() == 0, reason="no CUDA device"),
]


def run_intrinsics(device, words):
    device.compile([KERNEL])
    stream, host = device.stream(), np.zeros((32, 24), np.uint32)
    given, out = device.allocate(words.shape, words.dtype), device.allocate(host.shape, host.dtype)
    device.upload(given, words, stream)
    with device.capture(stream) as graph:
        intrinsics(device, given, out, stream)
    graph.replay(stream)
    device.download(host, out, stream)
    stream.synchronize()
    return host


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler to compare with")
def test_every_intrinsic_gives_the_same_bits_as_on_the_host():
    words = np.random.default_rng(1).integers(0, 2**32, (32, 8), dtype=np.uint32)
    words[:, :2] &= 0x3FFF3FFF  # no NaN: its payload may differ
    np.testing.assert_array_equal(run_intrinsics(CudaDevice(), words), run_intrinsics(EmulatedDevice(), words))
