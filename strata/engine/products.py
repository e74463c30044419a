"""Matrix products whose bits do not depend on the number of rows, on other rows or on threads; one copy of the weights.

Row products: the weights are cut into blocks of some hundred output rows, and NumPy multiplies *blocks outside, rows inside*. Each
inner product is a matrix-vector product of one block and one row, so a row's bits are its own, and a block stays in the cache for
all rows: 8 rows cost about twice one row. BLAS would repack the whole matrix for every few rows (2 rows cost twice one), and its
last bits depend on the row count.

Grid products: GEMM of exactly 128 rows and a fixed slice of output columns, on the same array.

``order="C"`` is what keeps blocks outside: left to itself NumPy puts the operand with the largest stride outside, here the rows of
the result, and every row reads all weights anew.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from strata.engine.rows import GRID

Floats = NDArray[np.float32]
Work = Callable[[int], None]
BLOCK_BYTES = 400_000
SLICE_ROWS = 768


def block_rows(rows: int, columns: int) -> int:
    """Output rows per block: a multiple of 8, a block within the cache, and blocks enough for the threads; least padding first."""
    largest = max(8, min(192, BLOCK_BYTES // (4 * columns) // 8 * 8))
    least = max(8, min(largest // 3, rows) // 8 * 8)
    candidates = range(least, largest + 1, 8)
    return min(candidates, key=lambda block: (-rows % block, -(-rows // block) % 8 != 0, -block))


def cuts(items: int, pieces: int) -> list[slice]:
    """``items`` in at most ``pieces`` slices of like size, none empty."""
    pieces = max(1, min(items, pieces))
    edges = [items * index // pieces for index in range(pieces + 1)]
    return [slice(start, stop) for start, stop in zip(edges[:-1], edges[1:], strict=True)]


class Matrix:
    """Weights float32 [rows, columns] as blocks, ``pieces`` lots of which threads share; padded with zero rows to whole blocks.

    ``bias`` float32 [rows] or None is to be added to every product.
    """

    def __init__(self, rows: int, columns: int, bias: Floats | None = None, pieces: int = 1) -> None:
        """Uninitialised weights: fill ``weights`` before use."""
        block = block_rows(rows, columns)
        count = -(-rows // block)
        padded = np.empty((count * block, columns), np.float32)
        padded[rows:] = 0
        self.rows, self.columns, self.bias = rows, columns, bias
        self.weights = padded[:rows]
        self.blocks = padded.reshape(count, 1, block, columns)
        self.cuts = cuts(count, pieces)
        self.pieces = [self.blocks[cut] for cut in self.cuts]
        self.slices = cuts(rows, max(2, round(rows / SLICE_ROWS)))

    @property
    def padded_rows(self) -> int:
        return self.blocks.shape[0] * self.blocks.shape[2]


class RowFrame:
    """Where row products of matrices of one shape leave ``rows`` rows: made once, used for every layer.

    ``out`` float32 [rows, matrix.padded_rows] is overwritten by each product.
    """

    def __init__(self, matrix: Matrix, out: Floats) -> None:
        count, _, block, _ = matrix.blocks.shape
        self.out = out
        whole = out.reshape(len(out), count, block, 1).transpose(1, 0, 2, 3)
        self.pieces = [whole[cut] for cut in matrix.cuts]

    def product(self, x: Floats, matrix: Matrix) -> Work:
        """``work(piece)`` for each of ``matrix.pieces``: its part of out = x [rows, columns] @ weights.T, row by row."""
        columns = x[None, :, :, None]
        weights, results = matrix.pieces, self.pieces

        def work(piece: int) -> None:
            np.matmul(weights[piece], columns, out=results[piece], order="C")

        return work


def grid_product(x: Floats, matrix: Matrix, out: Floats) -> tuple[Work, int]:
    """Work and its pieces: ``out`` [blocks * 128, matrix.padded_rows] = ``x`` [blocks * 128, columns] @ weights.T.

    Each product is of 128 rows and one slice of the output columns.
    """
    blocks = len(x) // GRID
    rows = x.reshape(blocks, GRID, -1)
    result = out.reshape(blocks, GRID, -1)

    def work(piece: int) -> None:
        columns, block = matrix.slices[piece // blocks], piece % blocks
        np.matmul(rows[block], matrix.weights[columns].T, out=result[block, :, columns])

    return work, len(matrix.slices) * blocks
