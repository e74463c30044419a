"""Matrix products whose bits do not depend on the number of rows, on other rows or on threads; one copy of the weights.

Row products: the weights are cut into blocks of some hundred output rows, and NumPy multiplies *blocks outside, rows inside*. Each inner
product is a matrix-vector product of one block and one row, so a row's bits are its own, and a block stays in the cache for
all rows: on 2 cores 8 rows cost about twice one row. BLAS would repack the whole matrix for every few rows (2 rows cost twice
one) and its last bits depend on the row count.

Grid products: GEMM of exactly 128 rows and a fixed slice of output columns, on the same array. ``order="C"`` is what keeps blocks
outside: left to itself NumPy loops over the operand with the largest stride first, here the rows of the result.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from strata.engine.rows import GRID
from strata.engine.threads import Threads, share

Floats = NDArray[np.float32]
BLOCK_BYTES = 400_000
SLICE_ROWS = 768


def block_rows(rows: int, columns: int) -> int:
    """Output rows per block: a multiple of 8, a block within the cache, and blocks enough for the threads; least padding first."""
    largest = max(8, min(192, BLOCK_BYTES // (4 * columns) // 8 * 8))
    least = max(8, min(largest // 3, rows) // 8 * 8)
    candidates = range(least, largest + 1, 8)
    return min(candidates, key=lambda block: (-rows % block, -(-rows // block) % 8 != 0, -block))


class Matrix:
    """Weights float32 [rows, columns] as blocks; rows are padded with zeros to a whole number of blocks.

    ``bias`` float32 [rows] or None is added to every product.
    """

    def __init__(self, rows: int, columns: int, bias: Floats | None = None) -> None:
        """Uninitialised weights: fill ``weights`` before use."""
        block = block_rows(rows, columns)
        count = -(-rows // block)
        padded = np.empty((count * block, columns), np.float32)
        padded[rows:] = 0
        self.rows, self.columns, self.bias = rows, columns, bias
        self.weights = padded[:rows]
        self.blocks = padded.reshape(count, 1, block, columns)
        slices = max(2, round(rows / SLICE_ROWS))
        edges = [share(rows, index, slices)[0] for index in range(slices + 1)]
        self.slices = [slice(start, stop) for start, stop in zip(edges[:-1], edges[1:], strict=True)]

    @property
    def padded_rows(self) -> int:
        return self.blocks.shape[0] * self.blocks.shape[2]


def row_product(x: Floats, matrix: Matrix, out: Floats) -> Callable[[int, int], None]:
    """Work for a share of threads: ``out`` [rows, matrix.padded_rows] = x [rows, columns] @ weights.T, row by row."""
    count, _, block, _ = matrix.blocks.shape
    columns = x[None, :, :, None]
    result = out.reshape(len(x), count, block, 1).transpose(1, 0, 2, 3)

    def work(index: int, threads: int) -> None:
        start, stop = share(count, index, threads)
        np.matmul(matrix.blocks[start:stop], columns, out=result[start:stop], order="C")

    return work


def grid_product(x: Floats, matrix: Matrix, out: Floats) -> Callable[[int, int], None]:
    """The same for ``x`` [blocks * 128, columns], in products of 128 rows and one slice of the output columns."""
    blocks = len(x) // GRID
    rows = x.reshape(blocks, GRID, -1)
    result = out.reshape(blocks, GRID, -1)
    units = len(matrix.slices) * blocks

    def work(index: int, threads: int) -> None:
        for unit in range(*share(units, index, threads)):
            columns, block = matrix.slices[unit // blocks], unit % blocks
            np.matmul(rows[block], matrix.weights[columns].T, out=result[block, :, columns])

    return work


def multiply(threads: Threads, work: Callable[[int, int], None]) -> None:
    """Run a product on all threads."""
    threads.run(lambda index: work(index, threads.count))
