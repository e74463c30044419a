"""Products of one activation with several matrices of different layouts in one launch (matvec.cu, matmul.cu): the bits of one launch each.

Files mix formats: attn_v is often stored finer than attn_q and attn_k, a file may have gate and up of two formats. Matrices of one layout
are joined at load; what is left is two or three, and a launch for each would cost more than the small ones take.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels.check import Shapes, ceil_div, int32
from strata.kernels.matmul import TILE, linear, linear_swiglu, tiles_for, uses_matvec
from strata.kernels.matvec import SWIGLU_ROWS, THREADS, TILE_ROWS, check_product, columns_for
from strata.kernels.tensors import Activations, Matrix

MOST = 3
NONE = "none"  # layouts.cuh


def _few(layouts: Sequence[str], count: int) -> bool:
    return all(uses_matvec(layout, count) for layout in layouts)


def parts_name(layouts: Sequence[str], count: int) -> KernelName:
    """The kernel for 2 or 3 matrices of these layouts."""
    names = ", ".join([*layouts, NONE][:MOST])
    if _few(layouts, count):
        return KernelName("matvec", f"matvec_parts<{names}, {columns_for(count)}>")
    return KernelName("matmul", f"matmul_parts<{names}, {tiles_for(count)}>")


def swiglu_parts_name(gate: str, up: str, count: int) -> KernelName:
    if _few((gate, up), count):
        return KernelName("matvec", f"matvec_swiglu_parts<{gate}, {up}, {columns_for(count)}>")
    return KernelName("matmul", f"matmul_swiglu_parts<{gate}, {up}, {tiles_for(count)}>")


def _arguments(matrix: Matrix, rows: int) -> list[Buffer | np.float32 | np.int32]:
    """The parameters of PART in product.cuh."""
    return [matrix.codes, matrix.scales, matrix.steps, np.float32(matrix.unit), int32(rows), *matrix.bias_arguments()]


def linear_parts(device: Device, matrices: Sequence[Matrix], x: Activations, y: Buffer, stream: Stream) -> None:
    """``y`` float32 [count, sum of rows] = the outputs of one to three ``matrices`` beside each other, each x W^T + bias."""
    if len(matrices) == 1:
        linear(device, matrices[0], x, y, stream)
        return
    shapes = Shapes("parts")
    shapes.require(len(matrices) <= MOST, f"{len(matrices)} matrices, at most {MOST}")
    for matrix in matrices:
        check_product("parts", matrix, x)
    shapes.match("y", y, np.float32, x.count, sum(matrix.rows for matrix in matrices))
    layouts = [matrix.layout for matrix in matrices]
    blocks = sum(ceil_div(matrix.rows, TILE_ROWS) for matrix in matrices)
    columns = 1 if _few(layouts, x.count) else ceil_div(x.count, TILE * tiles_for(x.count))
    parts = [argument for matrix in matrices for argument in _arguments(matrix, matrix.rows)]
    parts += _arguments(matrices[0], 0) * (MOST - len(matrices))
    last = [matrices[0].grid, int32(x.width), x.codes, x.meta, int32(x.count), y, int32(y.shape[1])]
    device.launch(Launch(parts_name(layouts, x.count), (blocks, columns, 1), THREADS), [*parts, *last], stream)


def linear_swiglu_parts(device: Device, matrices: Sequence[Matrix], x: Activations, out: Activations, stream: Stream) -> None:
    """``out`` = silu(gate) * up, quantised; its padding must be zero. ``matrices``: one with rows of both in turn, or gate and up."""
    if len(matrices) == 1:
        linear_swiglu(device, matrices[0], x, out, stream)
        return
    gate, up = matrices
    out.check("swiglu_parts")
    for matrix in matrices:
        check_product("swiglu_parts", matrix, x)
    fits = gate.rows == up.rows == out.columns and out.columns % (SWIGLU_ROWS // 2) == 0 and out.count == x.count
    Shapes("swiglu_parts").require(fits, f"{gate.rows} gate and {up.rows} up rows, {x.count} x {out.columns} outputs")
    columns = 1 if _few((gate.layout, up.layout), x.count) else ceil_div(x.count, TILE * tiles_for(x.count))
    parts = [*_arguments(gate, gate.rows), *_arguments(up, up.rows)]
    last = [gate.grid, int32(x.width), x.codes, x.meta, int32(x.count), out.codes, out.meta, int32(out.width)]
    launch = Launch(swiglu_parts_name(gate.layout, up.layout, x.count), (out.columns // (SWIGLU_ROWS // 2), columns, 1), THREADS)
    device.launch(launch, [*parts, *last], stream)
