"""Rows of the embedding matrix as floats, from any layout (embed.cu)."""

from __future__ import annotations

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels.check import Shapes, int32
from strata.kernels.tensors import Matrix


def kernel_name(layout: str) -> KernelName:
    return KernelName("embed", f"embed<{layout}>")


def embed(device: Device, matrix: Matrix, tokens: Buffer, y: Buffer, stream: Stream) -> None:
    """``y`` float32 [count, columns]: row ``tokens[i]`` (int32 [count], clamped to the vocabulary) of ``matrix``, exact."""
    shapes = Shapes("embed", columns=matrix.columns)
    matrix.check("embed")
    shapes.match("tokens", tokens, np.int32, "count")
    shapes.match("y", y, np.float32, "count", "columns")
    device.launch(
        Launch(kernel_name(matrix.layout), (tokens.shape[0], 1, 1), 256), [*matrix.arguments(), tokens, int32(matrix.columns), y], stream
    )
