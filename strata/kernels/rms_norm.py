"""RMSNorm after the residual sum, its result quantised (rms_norm.cu)."""

from __future__ import annotations

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels.check import Shapes, int32
from strata.kernels.tensors import Activations

PLAIN, ADDED, KEPT = (KernelName("rms_norm", f"rms_norm<{end}>") for end in ("false", "true", "true, true"))


def rms_norm(
    device: Device, rows: Buffer, hidden: Buffer, delta: Buffer | None, gamma: Buffer, eps: float, out: Activations, stream: Stream,
    floats: Buffer | None = None,
) -> None:  # fmt: skip
    """``out[i]`` = RMSNorm(hidden[rows[i]] (+ delta[rows[i]])) * gamma, quantised; the sum is written back to ``hidden``.

    ``rows`` int32 [count], each row at most once where ``delta`` is added; ``hidden``, ``delta`` float32 [any, columns]; ``gamma`` float32
    [columns]. All of ``out`` is written, its padding with zeros. ``floats`` float32 as ``hidden``, only with ``delta``: the normed rows
    before they are quantised, row ``rows[i]`` each.
    """
    shapes = Shapes("rms_norm", columns=out.columns, count=out.count)
    out.check("rms_norm")
    shapes.match("rows", rows, np.int32, "count")
    shapes.match("hidden", hidden, np.float32, "rows", "columns")
    shapes.match("gamma", gamma, np.float32, "columns")
    if delta is not None:
        shapes.match("delta", delta, np.float32, "rows", "columns")
    if floats is not None:
        shapes.match("floats", floats, np.float32, "kept", "columns")
        shapes.require(delta is not None and shapes["kept"] >= shapes["rows"], "rows are kept where a delta is added, all of them")
    sizes = [np.float32(eps), int32(out.columns), int32(out.width)]
    launch = Launch(PLAIN if delta is None else ADDED if floats is None else KEPT, (out.count, 1, 1), 256)
    outputs = [out.codes, out.meta, hidden if floats is None else floats]
    device.launch(launch, [rows, hidden, hidden if delta is None else delta, gamma, *sizes, *outputs], stream)
