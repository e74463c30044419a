"""Runs every intrinsic of cuda_src/include once (see intrinsics.cu): the proof that device and host bodies agree."""

from __future__ import annotations

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels.check import Shapes

KERNEL = KernelName("intrinsics", "intrinsics")


def intrinsics(device: Device, words: Buffer, results: Buffer, stream: Stream) -> None:
    """``words`` uint32 [32, 8] -> ``results`` uint32 [32, 24]."""
    shapes = Shapes("intrinsics")
    shapes.match("words", words, np.uint32, 32, 8)
    shapes.match("results", results, np.uint32, 32, 24)
    device.launch(Launch(KERNEL, (1, 1, 1), 32), [words, results], stream)
