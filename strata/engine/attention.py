"""Attention over a paged cache: queries against keys and values as stored, page by page.

Row parts. One page of a row's context is a tile, which rows of one slot share (bundles.py): scores, weights and weighted values are
computed per tile, relative to the row's highest score, and a row's tiles are added in page order. A tile's products give a row the
same bits whoever shares it, so they depend only on its query, its position and its pages' contents: not on where the pages lie, nor on
other rows or threads. Tiles whose pages are not consecutive are copied together first: the copy reads memory as fast as it comes, and
one product of many tiles in the cache follows (a product for each run of pages, in place, took longer: each call is a chance for threads
to meet at the GIL).

Grid parts. Blocks of 128 rows, one KV head's queries at a time, against spans of 512 keys, with a running maximum (flash attention).
Where spans end depends on the absolute position alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from strata.engine.bundles import Bundles, in_lots, most_bundled
from strata.engine.kv import PagedKV, Pages
from strata.engine.products import cuts
from strata.engine.rows import GRID, GridPart, RowPart
from strata.engine.threads import Threads

Floats = NDArray[np.float32]
SPAN = 512
TILES_PER_PIECE = 5
TILES_TOGETHER = 96
COPY_BYTES = 1 << 20
SCRATCH_BYTES = 64 << 20


class Copies:
    """Where threads copy tiles to: one buffer for each piece, kept between windows."""

    def __init__(self, kv: PagedKV, pieces: int) -> None:
        tile = kv.heads * kv.page_tokens * kv.head_dim
        self.tiles = max(1, COPY_BYTES // (4 * tile))
        self.buffers = np.empty((pieces, self.tiles, kv.heads, kv.page_tokens, kv.head_dim), np.float32)


class Scratch:
    """What tiles compute, for one layer after the other. ``queries``: of one KV head, of all rows of a bundle."""

    def __init__(self, kv: PagedKV, queries: int, tiles: int) -> None:
        self.scores = np.empty((tiles, kv.heads, queries, kv.page_tokens), np.float32)
        self.maxima = np.empty((tiles, kv.heads, queries, 1), np.float32)
        # Weighted values and, behind them, the sum of the weights: what is merged by the same rule is one array.
        self.partials = np.empty((tiles, kv.heads, queries, kv.head_dim + 1), np.float32)


class RowAttention:
    """The attention of rows in bundles: made once for a window, used for every layer."""

    def __init__(self, part: Bundles, kv: PagedKV, copies: Copies, scratch: Scratch) -> None:
        tiles = part.num_tiles
        self.part, self.kv = part, kv
        self.scores, self.maxima, self.partials = scratch.scores[:tiles], scratch.maxima[:tiles], scratch.partials[:tiles]
        self.cuts = cuts(tiles, min(len(copies.buffers), tiles // TILES_PER_PIECE))
        self.between = self.cuts if tiles > TILES_TOGETHER else [slice(0, tiles)]
        self.steps = [list(self._steps(piece, cut, copies)) for piece, cut in enumerate(self.cuts)]
        by_place = self.scores.reshape(tiles, kv.heads, part.size, -1, kv.page_tokens)
        self.hidden = [by_place[tile, :, place, :, seen:] for tile, place, seen in part.hidden]
        self.merged = np.empty((len(part.firsts), *self.partials.shape[1:]), np.float32)
        self.sums = list(self._sums(np.diff([*part.firsts.tolist(), tiles]).tolist()))

    def run(self, queries: Floats, layer: int, threads: Threads, out: Floats) -> None:
        """``queries`` (already scaled) and ``out`` float32 [rows, KV heads, group, head_dim].

        Threads share what reads the cache. What lies between takes long enough to be shared only for many tiles: threads that run
        short NumPy calls side by side keep meeting at the GIL.
        """
        spread, between = self._spread(queries), self.between
        threads.run(lambda piece: self.score(piece, spread, layer), len(self.cuts))
        for hidden in self.hidden:
            hidden.fill(-np.inf)
        threads.run(lambda piece: self.find_maxima(between[piece]), len(between))
        highest = np.maximum.reduceat(self.maxima, self.part.firsts, axis=0)[self.part.of_tile]
        threads.run(lambda piece: self.soften(between[piece], highest), len(between))
        threads.run(lambda piece: self.weigh(piece, layer), len(self.cuts))
        for tiles, merged in self.sums:
            np.add.reduce(tiles, axis=1, out=merged)
        self._collect(out)

    def _spread(self, queries: Floats) -> Floats:
        """Queries [rows, KV heads, group, head_dim] of each tile's bundle: [tiles, KV heads, size * group, head_dim]."""
        part = self.part
        if part.size == 1:
            return queries[part.of_tile]
        bundled = queries[part.rows].swapaxes(1, 2)
        return bundled.reshape(len(bundled), self.kv.heads, -1, self.kv.head_dim)[part.of_tile]

    def _collect(self, out: Floats) -> None:
        """Weighted values over sums of weights, from bundles back to rows."""
        if self.part.size == 1:
            np.divide(self.merged[..., :-1], self.merged[..., -1:], out=out)
            return
        result = np.divide(self.merged[..., :-1], self.merged[..., -1:])
        by_place = result.reshape(len(result), self.kv.heads, self.part.size, -1, self.kv.head_dim).swapaxes(1, 2)
        out[:] = by_place[self.part.real]

    def score(self, piece: int, queries: Floats, layer: int) -> None:
        """Queries [tiles, KV heads, queries, head_dim] times keys, for the tiles of one of ``cuts``."""
        for cut, pages, copy in self.steps[piece]:
            keys = self.kv.levels(layer, 0, pages, copy)
            np.matmul(queries[cut], keys.swapaxes(2, 3), out=self.scores[cut])
            scales = self.kv.level_scales(layer, 0, pages)
            if scales is not None:
                self.scores[cut] *= scales

    def find_maxima(self, cut: slice) -> None:
        """The highest score of each tile."""
        np.maximum.reduce(self.scores[cut], axis=-1, keepdims=True, out=self.maxima[cut])

    def soften(self, cut: slice, highest: Floats) -> None:
        """Scores to weights, exp(score - highest of the row), and their sums."""
        scores = self.scores[cut]
        np.subtract(scores, highest[cut], out=scores)
        np.exp(scores, out=scores)
        np.add.reduce(scores, axis=-1, keepdims=True, out=self.partials[cut, ..., -1:])

    def weigh(self, piece: int, layer: int) -> None:
        """Weights times values, for the tiles of one of ``cuts``."""
        for cut, pages, copy in self.steps[piece]:
            values = self.kv.levels(layer, 1, pages, copy)
            weights, scales = self.scores[cut], self.kv.level_scales(layer, 1, pages)
            if scales is not None:
                weights *= scales
            np.matmul(weights, values, out=self.partials[cut, ..., :-1])

    def _sums(self, counts: list[int]) -> Iterator[tuple[Floats, Floats]]:
        """Partials [bundles, tiles, ...] and where their sums over tiles go, for runs of bundles with as many tiles each."""
        done = tile = 0
        for count, run in groupby(counts):
            bundles = len(list(run))
            partials = self.partials[tile : tile + bundles * count]
            yield partials.reshape(bundles, count, *partials.shape[1:]), self.merged[done : done + bundles]
            done, tile = done + bundles, tile + bundles * count

    def _steps(self, piece: int, whole: slice, copies: Copies) -> Iterator[tuple[slice, Pages, Floats]]:
        """The tiles of one of ``cuts``, as many at a time as can be copied: which, their pages (a slice, if they lie so), where to."""
        for start in range(whole.start, whole.stop, copies.tiles):
            cut = slice(start, min(start + copies.tiles, whole.stop))
            pages = self.part.pages[cut]
            first = int(pages[0])
            consecutive = bool((pages == np.arange(first, first + len(pages))).all())
            yield cut, slice(first, first + len(pages)) if consecutive else pages, copies.buffers[piece, : len(pages)]


def row_attentions(part: RowPart, kv: PagedKV, group: int, copies: Copies) -> tuple[RowAttention, ...]:
    """The attention of a row part, in as many lots of rows as keep the scratch memory small; all share it."""
    most = most_bundled(group, kv.head_dim, kv.page_tokens)
    tile_bytes = 4 * kv.heads * most * group * (kv.page_tokens + kv.head_dim + 2)
    lots = list(in_lots(part, most, SCRATCH_BYTES // tile_bytes, kv.page_tokens))
    scratch = Scratch(kv, lots[0].size * group, max(lot.num_tiles for lot in lots))
    return tuple(RowAttention(lot, kv, copies, scratch) for lot in lots)


class GridAttention:
    """The attention of one grid part. A piece is one block of rows and one KV head."""

    def __init__(self, part: GridPart, kv: PagedKV) -> None:
        self.part, self.kv = part, kv
        self.pieces = part.blocks * kv.heads
        self.later = np.triu(np.ones((GRID, GRID), bool), 1)
        self.ones = np.ones((SPAN, 1), np.float32)

    def piece(self, number: int, queries: Floats, layer: int, out: Floats) -> None:
        """``queries`` (already scaled) and ``out`` float32 [blocks * 128, KV heads, group, head_dim]."""
        block, head = divmod(number, self.kv.heads)
        rows = slice(block * GRID, block * GRID + GRID)
        own = queries[rows, head]
        flat = own.reshape(-1, own.shape[-1])
        highest: Floats | float = -np.inf
        sums = result = np.float32(0)
        end = self.part.position + rows.stop
        for start in range(0, end, SPAN):
            stop = min(start + SPAN, end)
            scores = np.matmul(flat, self._span(layer, 0, head, start, stop).T)
            if stop == end:
                np.copyto(scores.reshape(GRID, -1, stop - start)[:, :, -GRID:], -np.inf, where=self.later[:, None])
            before, highest = highest, np.maximum(highest, np.maximum.reduce(scores, axis=1, keepdims=True))
            scores -= highest
            np.exp(scores, out=scores)
            more_sums = np.matmul(scores, self.ones[: stop - start])
            more = np.matmul(scores, self._span(layer, 1, head, start, stop))
            if start:
                fade = np.exp(before - highest)
                more_sums += fade * sums
                more += fade * result
            sums, result = more_sums, more
        out[rows, head] = np.divide(result, sums).reshape(own.shape)

    def _span(self, layer: int, kv: int, head: int, start: int, stop: int) -> Floats:
        """Keys or values [stop - start, head_dim] of one head.

        A short last block has no pages for its pad positions; the first page stands in, hidden from all rows that count.
        """
        size = self.kv.page_tokens
        first, last = start // size, -(-stop // size)
        pages = self.part.pages[first:last]
        if len(pages) < last - first:
            pages = np.concatenate([pages, np.repeat(self.part.pages[:1], last - first - len(pages))])
        return self.kv.head(layer, kv, pages, head)[start - first * size : stop - first * size]
