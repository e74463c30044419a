"""Row products through BLAS's kernels for small matrices, where it has them: eight rows cost little more than one.

Theory. A matrix-vector product reads its block from the cache once for every row: 8 rows cost more than twice one. A GEMM reads it once
for all, but BLAS repacks both operands first, which for a few rows costs more than it saves, and sums in an order that depends on the
shape. On processors with AVX-512, OpenBLAS has GEMM kernels that do neither, for products small enough (``sgemm_small_kernel_permit``: up
to 1,200 results and 10^6 multiplications). So the weights are cut into tiles of a few output rows, and one NumPy call multiplies all rows
by one tile after the other.

There a row's bits do not depend on the rows beside it, which is not relied on but tried with random numbers, for every width of matrix
and number of rows (``tiles_for``). So rows may be added where more are quicker: one row goes along twice, since NumPy would make a
matrix-vector product of it, and three with a fourth, since the kernels take rows four at a time and a rest of three in two goes. With
other BLAS libraries and processors products.py multiplies blocks by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import threadpoolctl
from numpy.typing import NDArray

Floats = NDArray[np.float32]
ARCHITECTURES = ("SkylakeX", "Cooperlake", "SapphireRapids")
MOST_RESULTS = 1_200
MOST_PRODUCTS = 1_000_000
SIZES = (32, 16, 8)
ENOUGH = 8
FEWEST = 3  # with fewer a lot of rows could be a single one
CACHED_BYTES = 500_000
MATMUL_KEEPS_GIL = 500
"""Up to so many results matmul keeps the GIL, however long it takes."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """``size``: output rows of a tile. ``rows``: how many rows one product takes, at least ``FEWEST``."""

    size: int
    rows: int


@lru_cache(maxsize=None)
def tiles_for(columns: int) -> Tiles | None:
    """Tiles of weights with so many columns, or None where this BLAS has no kernels for them or their bits depend on the number of rows."""
    if not has_small_kernels():
        return None
    fitting = [Tiles(size, min(MOST_RESULTS, MOST_PRODUCTS // columns) // size) for size in SIZES]
    tiles = next((tiles for tiles in fitting if tiles.rows >= ENOUGH), fitting[-1])
    return tiles if tiles.rows >= FEWEST and keeps_rows_apart(columns, tiles) else None


@lru_cache(maxsize=None)
def has_small_kernels() -> bool:
    """Whether NumPy's BLAS is an OpenBLAS that chose kernels of a processor for which it has small ones."""
    found = threadpoolctl.ThreadpoolController().select(internal_api="openblas").info()
    return bool(found) and all(library.get("architecture") in ARCHITECTURES for library in found)


def keeps_rows_apart(columns: int, tiles: Tiles) -> bool:
    """Whether every row of a product of 2 to ``tiles.rows`` rows has the bits that it has beside itself, in either order of rows."""
    random = np.random.default_rng(0)
    x = random.standard_normal((tiles.rows, columns), np.float32)
    weights = random.standard_normal((2, tiles.size, columns), np.float32).swapaxes(1, 2)
    alone = np.concatenate([np.matmul(x[[row, row]], weights)[:, :1] for row in range(len(x))], axis=1)
    return all(
        np.array_equal(np.matmul(x[:rows], weights), alone[:, :rows])
        and np.array_equal(np.matmul(x[:rows][::-1].copy(), weights), alone[:, :rows][:, ::-1])
        for rows in range(2, tiles.rows + 1)
    )


def padded(rows: int) -> int:
    """The number of rows, no smaller, that is multiplied soonest (docs/LOG.md has the times)."""
    return 2 if rows == 1 else rows + (rows % 4 == 3)


def lots(rows: int, most: int) -> list[slice]:
    """``rows`` rows in lots of like size, at most ``most`` of them (``FEWEST`` or more); then none is a single row but of one."""
    count = -(-rows // most)
    edges = [rows * index // count for index in range(count + 1)]
    return [slice(start, stop) for start, stop in zip(edges, edges[1:])]


def as_tiles(rows: Floats, size: int) -> Floats:
    """Results [rows, tiles * size] as the product leaves them, [tiles, rows, size]: a view."""
    return rows.reshape(len(rows), -1, size).transpose(1, 0, 2)


def multiply(x: Floats, weights: Floats, most: int, out: Floats) -> None:
    """``out`` [rows, tiles * size] = ``x`` [rows, columns] times ``weights`` [tiles, columns, size]; at most ``most`` rows at a time."""
    size = weights.shape[2]
    if len(x) == 1:
        twice = np.empty((2, out.shape[1]), np.float32)
        np.matmul(x.repeat(2, axis=0), weights, out=as_tiles(twice, size))
        out[0] = twice[0]
        return
    for tiles, rows, into in steps(out, slice(0, len(weights)), Tiles(size, most), weights.shape[1]):
        np.matmul(x[rows], weights[tiles], out=into)


def tile_cuts(count: int, size: int, pieces: int, beside: int, lead: int) -> list[slice]:
    """``count`` tiles in at most ``pieces`` slices, the first longer by ``lead`` output rows where the others still let go of the GIL.

    ``beside``: rows of the product.
    """
    pieces = max(1, min(pieces, count * size * beside // (MATMUL_KEEPS_GIL + 1), count))
    others = max(0, count * size - lead) // pieces // size
    if others * size * beside <= MATMUL_KEEPS_GIL:
        return lots(count, -(-count // pieces))
    first = count - others * (pieces - 1)
    return [slice(0, first), *(slice(start, start + others) for start in range(first, count, others))]


class TileFrame:
    """Where row products by tiles leave their rows: made once, used for every layer.

    ``weights`` [tiles, columns, size] is one of them, for its shape. ``out`` float32 [rows, tiles * size] is overwritten by each product.
    """

    def __init__(self, rows: int, weights: Floats, tiles: Tiles, pieces: int, lead: int) -> None:
        count, columns, size = weights.shape
        whole = padded(rows)
        self.rows = rows
        self.padded = np.zeros((whole, columns), np.float32) if whole > rows else None
        into = np.empty((whole, count * size), np.float32)
        self.out = into[:rows]
        self.steps = [list(steps(into, cut, tiles, columns)) for cut in tile_cuts(count, size, pieces, len(into), lead)]

    def product(self, x: Floats, weights: Floats) -> tuple[Callable[[int], object], int]:
        """Work and its pieces: out = ``x`` [rows, columns] times ``weights``."""
        steps = self.steps
        if self.padded is not None:
            self.padded[: self.rows] = x
            x = self.padded

        def work(piece: int) -> None:
            for tiles, rows, into in steps[piece]:
                np.matmul(x[rows], weights[tiles], out=into)

        return work, len(steps)


def steps(into: Floats, cut: slice, tiles: Tiles, columns: int) -> Iterator[tuple[slice, slice, Floats]]:
    """Tiles, rows, and where their products go: where rows come in several lots, as many tiles at a time as stay in the cache."""
    rows_in_lots = lots(len(into), tiles.rows)
    together = cut.stop - cut.start if len(rows_in_lots) == 1 else max(1, CACHED_BYTES // (4 * tiles.size * columns))
    for start in range(cut.start, cut.stop, together):
        stop = min(start + together, cut.stop)
        for rows in rows_in_lots:
            yield slice(start, stop), rows, as_tiles(into[rows, start * tiles.size : stop * tiles.size], tiles.size)
