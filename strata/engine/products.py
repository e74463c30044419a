"""Matrix products whose bits do not depend on the number of rows, on other rows or on threads; one copy of the weights.

Row products: the weights are cut into blocks of some hundred output rows, and NumPy multiplies *blocks outside, rows inside*. Each
inner product is a matrix-vector product of one block and one row, so a row's bits are its own, and a block stays in the cache for
all rows: 8 rows cost about twice one row. BLAS would repack the whole matrix for every few rows (2 rows cost twice one), and its
last bits depend on the row count.

Grid products: GEMM of 128 rows and a fixed slice of output columns, on the same array.

Larger products are faster, and most BLAS sum each output in the same order whatever the size around it. That is not relied on but
tried: ``Matrix.verify`` multiplies the real weights both ways, and only where all bits agree one row goes through all blocks of a piece
at once, and up to 512 rows through one GEMM.

Where BLAS has kernels for small matrices, row products go by them instead: see tiles.py.

Two traps. ``order="C"`` is what keeps blocks outside: left to itself NumPy puts the operand with the largest stride outside, here the
rows of the result, and every row reads all weights anew. And matmul keeps the GIL for a result of 500 items or fewer, however long
it takes, which is why one row goes through ``dot``, and a few rows are cut into fewer pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from strata.engine.rows import GRID
from strata.engine.tiles import MATMUL_KEEPS_GIL, TileFrame, multiply, tiles_for

Floats = NDArray[np.float32]
Work = Callable[[int], object]
BLOCK_BYTES = 400_000
SLICE_ROWS = 1536
BATCHES = (4, 2, 1)
# The caller of a job begins some 20 us before the other threads have woken and their end is seen: about so many bytes of weights.
LEAD_BYTES = 400_000
ARENA_FLOATS = 16 << 20


def block_rows(rows: int, columns: int) -> int:
    """Output rows per block: a multiple of 8, a block within the cache, and blocks enough for the threads; least padding first."""
    largest = max(8, min(192, BLOCK_BYTES // (4 * columns) // 8 * 8))
    least = max(8, min(largest // 3, rows) // 8 * 8)
    candidates = range(least, largest + 1, 8)
    return min(candidates, key=lambda block: (-rows % block, -(-rows // block) % 8 != 0, -block))


def row_block(rows: int, columns: int) -> int:
    """Output rows per block, or per tile where products go by tiles."""
    tiles = tiles_for(columns)
    return block_rows(rows, columns) if tiles is None else tiles.size


def cuts(items: int, pieces: int) -> list[slice]:
    """``items`` in at most ``pieces`` slices of like size, none empty."""
    pieces = max(1, min(items, pieces))
    edges = [items * index // pieces for index in range(pieces + 1)]
    return [slice(start, stop) for start, stop in zip(edges[:-1], edges[1:], strict=True)]


def led_cuts(rows: int, pieces: int, lead: int) -> list[slice]:
    """``rows`` rows in ``pieces`` slices, the first ``lead`` rows longer than the others; in one, if there are no more rows than that."""
    others = max(0, rows - lead) // pieces // 8 * 8
    if not others:
        return [slice(0, rows)]
    first = rows - others * (pieces - 1)
    return [slice(0, first), *(slice(start, start + others) for start in range(first, rows, others))]


class Arena:
    """Memory for weights in large lots: from 4 MiB on NumPy asks for huge pages, and streaming through them is a tenth faster."""

    def __init__(self) -> None:
        self._rest = np.empty(0, np.float32)

    def take(self, rows: int, columns: int) -> Floats:
        """Uninitialised float32 [rows, columns]; begins at a cache line."""
        size = -(-rows * columns // 16) * 16
        if size > len(self._rest):
            self._rest = np.empty(max(size, ARENA_FLOATS), np.float32)
        taken, self._rest = self._rest[: rows * columns], self._rest[size:]
        return taken.reshape(rows, columns)


class Buffers:
    """Arrays for results that the next taker of the same use and columns overwrites: large fresh ones would cost page faults."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], Floats] = {}

    def take(self, use: str, rows: int, columns: int) -> Floats:
        """Float32 [rows, columns], C-contiguous, filled with anything."""
        key = (use, columns)
        if key not in self._held or len(self._held[key]) < rows:
            self._held[key] = np.empty((rows, columns), np.float32)
        return self._held[key][:rows]


class Matrix:
    """Weights float32 [rows, columns] as blocks, which threads share in ``pieces``; padded with zero rows to whole blocks.

    ``bias`` float32 [rows] or None is to be added to every product.
    """

    def __init__(self, rows: int, columns: int, bias: Floats | None, pieces: int, arena: Arena) -> None:
        """Uninitialised weights: fill ``weights`` before use."""
        block = row_block(rows, columns)
        count = -(-rows // block)
        padded = arena.take(count * block, columns)
        padded[rows:] = 0
        self.rows, self.columns, self.bias = rows, columns, bias
        self.weights = padded[:rows]
        self.blocks = padded.reshape(count, 1, block, columns)
        self.tiles, self.tile_weights = tiles_for(columns), self.blocks[:, 0].swapaxes(1, 2)
        self.most_pieces = pieces
        self._pieces: dict[int, list[Floats]] = {}
        self.flat_cuts = led_cuts(count * block, pieces, LEAD_BYTES // (4 * columns))
        self.flat_pieces = [padded[cut] for cut in self.flat_cuts]
        self.slices = cuts(rows, max(2, round(rows / SLICE_ROWS)))
        self.row_at_once = self.grid_at_once = False

    @property
    def padded_rows(self) -> int:
        return self.blocks.shape[0] * self.blocks.shape[2]

    def pieces(self, count: int) -> list[Floats]:
        """The blocks in (at most) ``count`` pieces."""
        if count not in self._pieces:
            self._pieces[count] = [self.blocks[cut] for cut in cuts(len(self.blocks), count)]
        return self._pieces[count]

    def verify(self) -> None:
        """Try whether larger products give the same bits here, and use them if so. A matter of the shape, not of the weights."""
        x = np.random.default_rng(0).standard_normal((max(BATCHES) * GRID, self.columns)).astype(np.float32)
        alone = np.matmul(self.blocks, x[None, :1, :, None], order="C").ravel()
        at_once = np.concatenate([np.dot(piece, x[0]) for piece in self.flat_pieces])
        self.row_at_once = np.array_equal(alone, at_once, equal_nan=True)
        self.grid_at_once = all(self._batches_agree(x, self.weights[cut].T) for cut in (self.slices[0], self.slices[-1]))

    @staticmethod
    def _batches_agree(x: Floats, weights: Floats) -> bool:
        single = np.concatenate([np.matmul(x[row : row + GRID], weights) for row in range(0, len(x), GRID)])
        return all(np.array_equal(np.matmul(x[: blocks * GRID], weights), single[: blocks * GRID], equal_nan=True) for blocks in BATCHES)


class RowFrame:
    """Where row products of matrices of one shape leave their rows: made once, used for every layer.

    ``out`` float32 [rows, matrix.padded_rows] is overwritten by each product.
    """

    def __init__(self, matrix: Matrix, rows: int) -> None:
        count, _, block, _ = matrix.blocks.shape
        self.tiles = None
        if matrix.tiles is not None:
            lead = LEAD_BYTES // (4 * matrix.columns)
            self.tiles = TileFrame(rows, matrix.tile_weights, matrix.tiles, matrix.most_pieces, lead)
            self.out = self.tiles.out
            return
        self.out = np.empty((rows, matrix.padded_rows), np.float32)
        whole = self.out.reshape(rows, count, block, 1).transpose(1, 0, 2, 3)
        self.count = min(matrix.most_pieces, max(1, self.out.size // (MATMUL_KEEPS_GIL + 1)))
        self.pieces = [whole[cut] for cut in cuts(count, self.count)]
        self.flat_pieces = [self.out[0, cut] for cut in matrix.flat_cuts] if rows == 1 and matrix.row_at_once else None

    def product(self, x: Floats, matrix: Matrix) -> tuple[Work, int]:
        """Work and its pieces: out = x [rows, columns] @ weights.T, row by row."""
        if self.tiles is not None:
            return self.tiles.product(x, matrix.tile_weights)
        if self.flat_pieces is not None:
            row, flat, into = x[0], matrix.flat_pieces, self.flat_pieces
            return lambda piece: np.dot(flat[piece], row, into[piece]), len(flat)
        columns, blocks, results = x[None, :, :, None], matrix.pieces(self.count), self.pieces
        return lambda piece: np.matmul(blocks[piece], columns, out=results[piece], order="C"), len(blocks)


def grouped_product(x: Floats, groups: Sequence[tuple[slice, Floats]], out: Floats, threads: int) -> tuple[Work, int]:
    """Work and its pieces: for each group (rows, blocks [blocks, 1, block, columns]), out[rows] = x[rows] @ weights.T, row by row.

    ``x`` [rows, columns], ``out`` [rows, blocks * block], C-contiguous.
    """
    tiles = tiles_for(x.shape[1])
    jobs = []
    for rows, blocks in groups:
        count, _, block, _ = blocks.shape
        most = max(1, out[rows].size // (MATMUL_KEEPS_GIL + 1))
        for cut in cuts(count, min(most, -(-2 * threads // len(groups)))):
            jobs.append((blocks[cut], x[rows], out[rows, cut.start * block : cut.stop * block]))

    def work(piece: int) -> None:
        blocks, rows, result = jobs[piece]
        if tiles is not None:
            multiply(rows, blocks[:, 0].swapaxes(1, 2), tiles.rows, result)
        else:
            whole = result.reshape(len(rows), *blocks.shape[:3:2], 1).transpose(1, 0, 2, 3)
            np.matmul(blocks, rows[None, :, :, None], out=whole, order="C")

    return work, len(jobs)


def grid_product(x: Floats, matrix: Matrix, out: Floats, threads: int) -> tuple[Work, int]:
    """Work and its pieces: ``out`` [blocks * 128, matrix.padded_rows] = ``x`` [blocks * 128, columns] @ weights.T."""
    slices = matrix.slices
    batches = row_batches(len(x) // GRID, -(-threads // len(slices)) if matrix.grid_at_once else len(x))

    def work(piece: int) -> None:
        rows, columns = batches[piece % len(batches)], slices[piece // len(batches)]
        np.matmul(x[rows], matrix.weights[columns].T, out=out[rows, columns])

    return work, len(slices) * len(batches)


def row_batches(blocks: int, least: int) -> list[slice]:
    """The rows of ``blocks`` blocks in batches of the largest size that gives at least ``least`` of them, and smaller ones at the end."""
    fitting = [size for size in BATCHES if blocks // size >= least] or [1]
    batches: list[slice] = []
    start = 0
    while start < blocks:
        size = next(size for size in fitting if start + size <= blocks)
        batches.append(slice(start * GRID, (start + size) * GRID))
        start += size
    return batches
