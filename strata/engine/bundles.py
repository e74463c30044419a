"""Rows of one slot that look at the same pages, side by side: what attention reads once for all of them.

A *bundle* is consecutive rows of one run (a token and its drafts; some rows of a prompt), and a *tile* one page of a bundle's context. A
row sees no further than itself: the places of a tile behind it are hidden, whole tiles perhaps.

How many rows a bundle may have is a question of bits: a product of a tile with the queries of several rows must give each what it gives
alone. BLAS's kernels for small matrices do (tiles.py), which is tried here for the shapes at hand; elsewhere each row is a bundle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from strata.engine.rows import RowPart, Run
from strata.engine.tiles import MOST_PRODUCTS, MOST_RESULTS, has_small_kernels

Ints = NDArray[np.int64]
TILE_COST = 4
"""Reading a tile costs as much as multiplying it by the queries of so many rows."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Rows ``row .. row + count - 1`` of the layout at ``position`` and on; ``pages`` holds what the last of them sees."""

    row: int
    count: int
    position: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bundles:
    """Rows ``start .. stop - 1`` of the layout in bundles of ``size`` places; a place too many repeats the bundle's last row.

    ``rows`` int64 [bundles, size], counted from ``start``; ``real`` bool [bundles, size]. ``firsts`` int64 [bundles] is each bundle's first
    tile, ``of_tile`` its inverse, ``pages`` the page of each tile. ``hidden``: (tile, place in the bundle, how many positions it sees).
    """

    start: int
    stop: int
    size: int
    rows: Ints
    real: NDArray[np.bool_]
    firsts: Ints
    of_tile: Ints
    pages: Ints
    hidden: tuple[tuple[int, int, int], ...]

    @property
    def num_tiles(self) -> int:
        return len(self.pages)


def in_lots(part: RowPart, most: int, most_tiles: int, page_tokens: int) -> Iterator[Bundles]:
    """The part's rows in bundles of at most ``most``, and these in lots of at most so many tiles (more, if one bundle has more)."""
    size = bundle_size(part.runs, most)
    lot: list[Bundle] = []
    tiles = 0
    for bundle in cut(part, size, page_tokens):
        if lot and tiles + len(bundle.pages) > most_tiles:
            yield joined(lot, size, page_tokens)
            lot, tiles = [], 0
        lot.append(bundle)
        tiles += len(bundle.pages)
    yield joined(lot, size, page_tokens)


def bundle_size(runs: Sequence[Run], most: int) -> int:
    """The size for which reading tiles and multiplying them by all places costs least; of equals the smallest."""
    sizes = range(1, min(most, max(run.count for run in runs)) + 1)
    return min(sizes, key=lambda size: (TILE_COST + size) * sum(-(-run.count // size) * len(run.pages) for run in runs))


def cut(part: RowPart, size: int, page_tokens: int) -> Iterator[Bundle]:
    row = part.start
    for run in part.runs:
        for start in range(0, run.count, size):
            count = min(size, run.count - start)
            position = run.position + start
            yield Bundle(row + start, count, position, run.pages[: (position + count - 1) // page_tokens + 1])
        row += run.count


def joined(lot: Sequence[Bundle], size: int, page_tokens: int) -> Bundles:
    """Consecutive bundles as arrays."""
    counts = np.array([len(bundle.pages) for bundle in lot], np.int64)
    firsts = np.cumsum(counts) - counts
    places = np.arange(size)
    taken = np.array([bundle.count for bundle in lot], np.int64)[:, None]
    rows = np.array([bundle.row - lot[0].row for bundle in lot], np.int64)[:, None] + np.minimum(places, taken - 1)
    return Bundles(
        start=lot[0].row,
        stop=lot[-1].row + lot[-1].count,
        size=size,
        rows=rows,
        real=places < taken,
        firsts=firsts,
        of_tile=np.repeat(np.arange(len(lot)), counts),
        pages=np.array([page for bundle in lot for page in bundle.pages], np.int64),
        hidden=tuple(
            (first + tile, place, visible)
            for first, bundle in zip(firsts.tolist(), lot)
            for place in range(size)
            for tile, visible in behind(bundle, place, page_tokens)
        ),
    )


def behind(bundle: Bundle, place: int, page_tokens: int) -> Iterator[tuple[int, int]]:
    """Tiles of which the row at ``place`` does not see everything, and how much it sees."""
    seen = bundle.position + min(place, bundle.count - 1) + 1
    for tile in range(seen // page_tokens, len(bundle.pages)):
        yield tile, max(0, seen - tile * page_tokens)


@lru_cache(maxsize=None)
def most_bundled(group: int, dim: int, page_tokens: int) -> int:
    """How many rows, of ``group`` query heads per KV head, one product with a tile may serve, each with the bits that it has alone."""
    most = min(MOST_RESULTS // max(dim, page_tokens), MOST_PRODUCTS // (dim * page_tokens)) // group
    if most < 2 or group < 2 or not has_small_kernels():  # a single query would be a matrix-vector product
        return 1
    random = np.random.default_rng(0)
    queries, weights = (random.standard_normal((1, most * group, width), np.float32) for width in (dim, page_tokens))
    tile = random.standard_normal((2, page_tokens, dim), np.float32)
    for x, other in ((queries, tile.swapaxes(1, 2)), (weights, tile)):
        alone = np.concatenate([np.matmul(x[:, row : row + group], other) for row in range(0, most * group, group)], axis=1)
        for rows in range(2, most + 1):
            if not np.array_equal(np.matmul(x[:, : rows * group], other), alone[:, : rows * group]):
                return 1
    return most
