"""Products on the matrix units (matmul.cu): many activation rows, and float16 weights at any number of rows.

``linear`` and ``linear_swiglu`` are what the forward pass calls: they take matvec.py's kernels where few rows make those faster.
"""

from __future__ import annotations

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels import matvec as few
from strata.kernels.check import ceil_div, int32
from strata.kernels.matvec import SWIGLU_ROWS, THREADS, TILE_ROWS, check_output, check_swiglu
from strata.kernels.tensors import Activations, Matrix

TILES = (1, 2, 3, 4)
TILE = 8  # activation rows


def tiles_for(count: int) -> int:
    """Tiles of 8 activation rows that a block computes: the weights are decoded once for all of them."""
    return min(ceil_div(count, TILE), TILES[-1])


def kernel_name(layout: str, count: int, swiglu: bool = False) -> KernelName:
    return KernelName("matmul", f"matmul{'_swiglu' if swiglu else ''}<{layout}, {tiles_for(count)}>")


def matmul(device: Device, matrix: Matrix, x: Activations, y: Buffer, stream: Stream) -> None:
    """``y`` float32 [count, rows] = x W^T + bias, any number of rows from 1."""
    check_output("matmul", matrix, x, y)
    grid = (ceil_div(matrix.rows, TILE_ROWS), ceil_div(x.count, TILE * tiles_for(x.count)), 1)
    arguments = [*matrix.arguments(), x.codes, x.meta, int32(x.count), *matrix.bias_arguments(), y]
    device.launch(Launch(kernel_name(matrix.layout, x.count), grid, THREADS), arguments, stream)


def matmul_swiglu(device: Device, matrix: Matrix, x: Activations, out: Activations, stream: Stream) -> None:
    """As matvec_swiglu, any number of rows from 1."""
    check_swiglu("matmul_swiglu", matrix, x, out)
    grid = (matrix.rows // SWIGLU_ROWS, ceil_div(x.count, TILE * tiles_for(x.count)), 1)
    outputs = [out.codes, out.meta, int32(out.width)]
    arguments = [*matrix.arguments(), x.codes, x.meta, int32(x.count), *matrix.bias_arguments(), *outputs]
    device.launch(Launch(kernel_name(matrix.layout, x.count, swiglu=True), grid, THREADS), arguments, stream)


def uses_matvec(layout: str, count: int) -> bool:
    """Whether the few-rows kernels serve; the bits are the same either way."""
    return count <= few.MAX_COUNT and layout != "half"


def linear_name(layout: str, count: int, swiglu: bool = False) -> KernelName:
    """The kernel that ``linear`` (or ``linear_swiglu``) launches, to be compiled ahead."""
    return (few.kernel_name if uses_matvec(layout, count) else kernel_name)(layout, count, swiglu)


def linear(device: Device, matrix: Matrix, x: Activations, y: Buffer, stream: Stream) -> None:
    """``y`` float32 [count, rows] = x W^T + bias."""
    (few.matvec if uses_matvec(matrix.layout, x.count) else matmul)(device, matrix, x, y, stream)


def linear_swiglu(device: Device, matrix: Matrix, x: Activations, out: Activations, stream: Stream) -> None:
    """``out`` = silu(gate) * up, quantised."""
    (few.matvec_swiglu if uses_matvec(matrix.layout, x.count) else matmul_swiglu)(device, matrix, x, out, stream)
