"""Attention over a paged cache: queries against keys and values as stored, page by page.

Row parts. One page of one row's context is a tile: scores, their maximum, exp, sum and weighted values are computed per tile, and a
row's tiles are merged by their maxima in page order (flash decoding). A tile's products have one fixed shape, so a row's bits
depend only on its query, its position and its pages' contents: not on where the pages lie, nor on other rows or threads. Runs of
consecutive pages are read in place.

Grid parts. Half blocks of 64 queries of one KV head's group against spans of 512 keys, with a running maximum (flash attention).
Where spans end depends on the absolute position alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata.engine.kv import PagedKV
from strata.engine.products import cuts
from strata.engine.rows import GRID, GridPart, RowPart

Floats = NDArray[np.float32]
SPAN = 512
HALF = GRID // 2
TILES_PER_PIECE = 24


class RowAttention:
    """The attention of one row part: made once for a window, used for every layer. ``group``: queries per KV head."""

    def __init__(self, part: RowPart, kv: PagedKV, group: int) -> None:
        tiles, heads, dim = part.num_tiles, *kv.data.shape[3::2]
        self.part, self.kv = part, kv
        self.scores = np.empty((tiles, heads, group, kv.page_tokens), np.float32)
        self.maxima = np.empty((tiles, heads, group, 1), np.float32)
        self.sums = np.empty((tiles, heads, group, 1), np.float32)
        self.values = np.empty((tiles, heads, group, dim), np.float32)
        self.cuts = cuts(tiles, tiles // TILES_PER_PIECE)
        ends = [*part.firsts[1:].tolist(), tiles]
        self.hidden = [
            [
                self.scores[end - 1, :, :, filled:]
                for end, filled in zip(ends, part.filled, strict=True)
                if cut.start < end <= cut.stop and filled < kv.page_tokens
            ]
            for cut in self.cuts
        ]

    def piece(self, number: int, queries: Floats, layer: int) -> None:
        """The tiles of one of ``cuts``. ``queries`` float32 [rows, KV heads, group, head_dim], already scaled."""
        cut = self.cuts[number]
        scores, maxima = self.scores[cut], self.maxima[cut]
        self._score(cut, queries, layer)
        for hidden in self.hidden[number]:
            hidden.fill(-np.inf)
        np.maximum.reduce(scores, axis=-1, keepdims=True, out=maxima)
        np.subtract(scores, maxima, out=scores)
        np.exp(scores, out=scores)
        np.add.reduce(scores, axis=-1, keepdims=True, out=self.sums[cut])
        self._weigh(cut, layer)

    def _score(self, cut: slice, queries: Floats, layer: int) -> None:
        part = self.part
        if self.kv.scales is not None:
            keys = self.kv.gather(layer, part.pages[cut], 0)
            np.matmul(queries[part.row_of_tile[cut]], keys.swapaxes(2, 3), out=self.scores[cut])
            return
        stored = self.kv.data[layer, :, 0].swapaxes(2, 3)
        for row, first, stop, page in part.runs_in(cut):
            np.matmul(queries[row], stored[page : page + stop - first], out=self.scores[first:stop])

    def _weigh(self, cut: slice, layer: int) -> None:
        if self.kv.scales is not None:
            np.matmul(self.scores[cut], self.kv.gather(layer, self.part.pages[cut], 1), out=self.values[cut])
            return
        stored = self.kv.data[layer, :, 1]
        for _, first, stop, page in self.part.runs_in(cut):
            np.matmul(self.scores[first:stop], stored[page : page + stop - first], out=self.values[first:stop])

    def merge(self, out: Floats) -> None:
        """Each row's tiles, in page order, into ``out`` [rows, KV heads, group, head_dim]."""
        firsts, row_of_tile = self.part.firsts, self.part.row_of_tile
        weights = self.maxima
        weights -= np.maximum.reduceat(self.maxima, firsts, axis=0)[row_of_tile]
        np.exp(weights, out=weights)
        self.values *= weights
        self.sums *= weights
        np.divide(np.add.reduceat(self.values, firsts, axis=0), np.add.reduceat(self.sums, firsts, axis=0), out=out)


class GridAttention:
    """The attention of one grid part. A piece is one block of rows and one KV head."""

    def __init__(self, part: GridPart, kv: PagedKV) -> None:
        self.part, self.kv = part, kv
        self.heads, self.dim = kv.data.shape[3::2]
        self.pieces = part.blocks * self.heads
        self.later = np.triu(np.ones((HALF, HALF), bool), 1)
        self.ones = np.ones((SPAN, 1), np.float32)

    def piece(self, number: int, queries: Floats, layer: int, out: Floats) -> None:
        """``queries`` (already scaled) and ``out`` float32 [blocks * 128, KV heads, group, head_dim]."""
        block, head = divmod(number, self.heads)
        starts = (block * GRID, block * GRID + HALF)
        halves = [_Half(queries[row : row + HALF, head], self.part.position + row) for row in starts]
        end = halves[1].end
        for start in range(0, end, SPAN):
            keys, values = self._span(layer, head, start, min(start + SPAN, end))
            for half in halves:
                if start < half.end:
                    self._attend(half, start, keys[: half.end - start], values[: half.end - start])
        for row, half in zip(starts, halves, strict=True):
            half.result /= half.sums
            out[row : row + HALF, head] = half.result.reshape(HALF, -1, self.dim)

    def _attend(self, half: _Half, start: int, keys: Floats, values: Floats) -> None:
        scores = np.matmul(half.queries, keys.T)
        if start + len(keys) == half.end:
            own = scores.reshape(HALF, -1, len(keys))[:, :, -HALF:]
            np.copyto(own, -np.inf, where=self.later[:, None])
        highest = np.maximum(half.highest, np.maximum.reduce(scores, axis=1, keepdims=True))
        scores -= highest
        np.exp(scores, out=scores)
        sums = np.matmul(scores, self.ones[: len(keys)])
        result = np.matmul(scores, values)
        if start:
            fade = np.exp(half.highest - highest)
            sums += fade * half.sums
            result += fade * half.result
        half.highest, half.sums, half.result = highest, sums, result

    def _span(self, layer: int, head: int, start: int, stop: int) -> tuple[Floats, Floats]:
        """Keys and values [stop - start, head_dim] of one head.

        A short last block has no pages for its pad positions; the first page stands in, hidden from all rows that count.
        """
        size = self.kv.page_tokens
        first, last = start // size, -(-stop // size)
        pages = self.part.pages[first:last]
        if len(pages) < last - first:
            pages = np.concatenate([pages, np.repeat(self.part.pages[:1], last - first - len(pages))])
        own, rows = slice(head, head + 1), slice(start - first * size, stop - first * size)
        keys, values = (self.kv.gather(layer, pages, which, own).reshape(-1, self.dim)[rows] for which in (0, 1))
        return keys, values


class _Half:
    """64 rows of one head's group on their way along the keys: running maximum, sum of weights, weighted values."""

    def __init__(self, queries: Floats, position: int) -> None:
        self.queries = queries.reshape(-1, queries.shape[-1])
        self.end = position + HALF
        self.highest: Floats | float = -np.inf
        self.sums: Floats
        self.result: Floats
