"""Products with 1 to 8 activation rows (matvec.cu): weights read and decoded once for all of them.

The bits are those of matmul.py for the same row: which of the two runs depends on speed alone. float16 weights have no integer form and go
through matmul.py at any number of rows.
"""

from __future__ import annotations

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels.check import Shapes, ceil_div, int32
from strata.kernels.tensors import Activations, Matrix

TILE_ROWS, SWIGLU_ROWS, THREADS = 16, 64, 256
COLUMNS = (1, 2, 4, 8)
MAX_COUNT = COLUMNS[-1]


def columns_for(count: int) -> int:
    """The kernel's activation rows for ``count`` of them."""
    return next(columns for columns in COLUMNS if columns >= count)


def kernel_name(layout: str, count: int, swiglu: bool = False) -> KernelName:
    return KernelName("matvec", f"matvec{'_swiglu' if swiglu else ''}<{layout}, {columns_for(count)}>")


def check_product(kernel: str, matrix: Matrix, x: Activations) -> None:
    """Raises TypeError unless ``x`` can be multiplied with ``matrix``."""
    matrix.check(kernel)
    x.check(kernel)
    Shapes(kernel).require(x.columns == matrix.columns, f"{x.columns} activations per row for {matrix.columns} weights")


def check_swiglu(kernel: str, matrix: Matrix, x: Activations, out: Activations) -> None:
    """Raises TypeError unless ``out`` holds one value per two rows of ``matrix``, in whole groups of 32."""
    check_product(kernel, matrix, x)
    out.check(kernel)
    fits = matrix.rows == 2 * out.columns and out.columns % 32 == 0 and out.count == x.count
    Shapes(kernel).require(fits, f"{matrix.rows} gate and up rows, {x.count} x {out.columns} outputs")


def check_output(kernel: str, matrix: Matrix, x: Activations, y: Buffer) -> Shapes:
    """Raises TypeError unless ``y`` is float32 [count, rows]."""
    check_product(kernel, matrix, x)
    shapes = Shapes(kernel)
    shapes.match("y", y, np.float32, x.count, matrix.rows)
    return shapes


def matvec(device: Device, matrix: Matrix, x: Activations, y: Buffer, stream: Stream) -> None:
    """``y`` float32 [count, rows] = x W^T + bias, 1 to 8 rows."""
    shapes = check_output("matvec", matrix, x, y)
    shapes.require(1 <= x.count <= MAX_COUNT, f"1 to {MAX_COUNT} rows, not {x.count}")
    launch = Launch(kernel_name(matrix.layout, x.count), (ceil_div(matrix.rows, TILE_ROWS), 1, 1), THREADS)
    device.launch(launch, [*matrix.arguments(), x.codes, x.meta, int32(x.count), *matrix.bias_arguments(), y], stream)


def matvec_swiglu(device: Device, matrix: Matrix, x: Activations, out: Activations, stream: Stream) -> None:
    """``out`` = silu(gate) * up, quantised; ``matrix`` has gate and up rows in turn (recode.interleave). 1 to 8 rows.

    Padding of ``out`` (columns up to its width) is not written: it must be zero.
    """
    check_swiglu("matvec_swiglu", matrix, x, out)
    Shapes("matvec_swiglu").require(1 <= x.count <= MAX_COUNT, f"1 to {MAX_COUNT} rows, not {x.count}")
    launch = Launch(kernel_name(matrix.layout, x.count, swiglu=True), (matrix.rows // SWIGLU_ROWS, 1, 1), THREADS)
    outputs = [out.codes, out.meta, int32(out.width)]
    device.launch(launch, [*matrix.arguments(), x.codes, x.meta, int32(x.count), *matrix.bias_arguments(), *outputs], stream)
