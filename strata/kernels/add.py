"""The residual sum where no norm follows on this device (add.cu)."""

from __future__ import annotations

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels.check import Shapes, ceil_div, int32

KERNEL = KernelName("add", "add")


def add(device: Device, hidden: Buffer, delta: Buffer, stream: Stream) -> None:
    """``hidden`` float32 [rows, columns] += ``delta`` of the same shape."""
    shapes = Shapes("add")
    shapes.match("hidden", hidden, np.float32, "rows", "columns")
    shapes.match("delta", delta, np.float32, "rows", "columns")
    device.launch(Launch(KERNEL, (ceil_div(hidden.size, 256), 1, 1), 256), [hidden, delta, int32(hidden.size)], stream)
