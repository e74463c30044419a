"""RMSNorm after the residual sum, its result quantised (rms_norm.cu)."""

from __future__ import annotations

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels.check import Shapes, int32
from strata.kernels.tensors import Activations

PLAIN, ADDED = KernelName("rms_norm", "rms_norm<false>"), KernelName("rms_norm", "rms_norm<true>")


def rms_norm(
    device: Device, rows: Buffer, hidden: Buffer, delta: Buffer | None, gamma: Buffer, eps: float, out: Activations, stream: Stream
) -> None:
    """``out[i]`` = RMSNorm(hidden[rows[i]] (+ delta[rows[i]])) * gamma, quantised; the sum is written back to ``hidden``.

    ``rows`` int32 [count], each row at most once where ``delta`` is added; ``hidden``, ``delta`` float32 [any, columns]; ``gamma`` float32
    [columns]. All of ``out`` is written, its padding with zeros.
    """
    shapes = Shapes("rms_norm", columns=out.columns, count=out.count)
    out.check("rms_norm")
    shapes.match("rows", rows, np.int32, "count")
    shapes.match("hidden", hidden, np.float32, "rows", "columns")
    shapes.match("gamma", gamma, np.float32, "columns")
    if delta is not None:
        shapes.match("delta", delta, np.float32, "rows", "columns")
    sizes = [np.float32(eps), int32(out.columns), int32(out.width)]
    launch = Launch(PLAIN if delta is None else ADDED, (out.count, 1, 1), 256)
    device.launch(launch, [rows, hidden, hidden if delta is None else delta, gamma, *sizes, out.codes, out.meta], stream)
