"""silu(gate) * up, quantised, where gate and up could not be joined for a product that ends with it (swiglu.cu)."""

from __future__ import annotations

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels.check import Shapes, ceil_div, int32
from strata.kernels.tensors import Activations

KERNEL = KernelName("swiglu", "swiglu")
THREADS = 256


def swiglu(device: Device, gate_up: Buffer, out: Activations, stream: Stream) -> None:
    """``gate_up`` float32 [count, 2 columns], the gate first -> ``out`` [count, columns]. Padding of ``out`` must be zero."""
    shapes = Shapes("swiglu", count=out.count)
    out.check("swiglu")
    shapes.match("gate_up", gate_up, np.float32, "count", 2 * out.columns)
    shapes.require(out.columns % 32 == 0, f"{out.columns} columns are no whole groups of 32")
    grid = (ceil_div(out.columns // 32, THREADS // 32), out.count, 1)
    device.launch(Launch(KERNEL, grid, THREADS), [gate_up, int32(out.columns), int32(out.width), out.codes, out.meta], stream)
