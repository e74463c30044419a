"""Attention over a paged cache: queries against keys and values as stored, page by page.

Row parts. One page of one row's context is a tile: scores, their maximum, exp, sum and weighted values are computed per tile, and a row's
tiles are merged by their maxima in page order (flash decoding). A tile's products have one fixed shape, so a row's bits
depend only on its query, its position and its pages' contents: not on where the pages lie, nor on other rows or threads. Runs of
consecutive pages are read in place.

Grid parts. 128 queries of one head against keys in spans of 512, with a running maximum (flash attention). The spans' ends
depend only on the block's absolute position.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from strata.engine.kv import PagedKV
from strata.engine.rows import GRID, GridPart, RowPart
from strata.engine.threads import share

Floats = NDArray[np.float32]
SPAN = 512
HALF = GRID // 2


class RowAttention:
    """Attention of the rows of one part in one layer. ``queries`` float32 [rows, KV heads, group, head_dim], already scaled."""

    def __init__(self, queries: Floats, kv: PagedKV, layer: int, part: RowPart) -> None:
        rows, heads, group, dim = queries.shape
        self.queries, self.kv, self.layer, self.part = queries, kv, layer, part
        tiles = part.num_tiles
        self.scores = np.empty((tiles, heads, group, kv.page_tokens), np.float32)
        self.maxima = np.empty((tiles, heads, group, 1), np.float32)
        self.sums = np.empty((tiles, heads, group, 1), np.float32)
        self.values = np.empty((tiles, heads, group, dim), np.float32)

    def work(self, index: int, threads: int) -> None:
        """One thread's share of the tiles."""
        start, stop = share(self.part.num_tiles, index, threads)
        if start == stop:
            return
        scores = self.scores[start:stop]
        self._product(0, start, stop)
        self._mask(start, stop)
        np.max(scores, axis=-1, keepdims=True, out=self.maxima[start:stop])
        np.subtract(scores, self.maxima[start:stop], out=scores)
        np.exp(scores, out=scores)
        np.sum(scores, axis=-1, keepdims=True, out=self.sums[start:stop])
        self._product(1, start, stop)

    def _product(self, kv: int, start: int, stop: int) -> None:
        """Scores (``kv`` 0: queries with keys) or values (1: weights with values) of some tiles."""
        cache, part = self.kv, self.part
        if cache.scales is not None:
            stored = cache.gather(self.layer, part.pages[start:stop], kv)
            if kv:
                np.matmul(self.scores[start:stop], stored, out=self.values[start:stop])
            else:
                queries = self.queries[part.row_of_tile[start:stop]]
                np.matmul(queries, stored.transpose(0, 1, 3, 2), out=self.scores[start:stop])
            return
        stored = cache.data[self.layer, :, kv]
        for run in part.runs:
            first, last = max(run.first, start), min(run.first + run.count, stop)
            if first < last:
                page = run.page + first - run.first
                pages = stored[page : page + last - first]
                if kv:
                    np.matmul(self.scores[first:last], pages, out=self.values[first:last])
                else:
                    np.matmul(self.queries[run.row], pages.transpose(0, 1, 3, 2), out=self.scores[first:last])

    def _mask(self, start: int, stop: int) -> None:
        """Hide what lies after each row's own position; only its last tile has such."""
        part = self.part
        ends = [*part.firsts[1:].tolist(), part.num_tiles]
        for end, filled in zip(ends, part.filled, strict=True):
            if start < end <= stop:
                self.scores[end - 1, :, :, filled:] = -np.inf

    def merge(self, out: Floats) -> None:
        """Each row's tiles, in page order, into ``out`` [rows, KV heads, group, head_dim]."""
        firsts, row_of_tile = self.part.firsts, self.part.row_of_tile
        highest = np.maximum.reduceat(self.maxima, firsts, axis=0)
        weights = np.exp(self.maxima - highest[row_of_tile])
        self.values *= weights
        self.sums *= weights
        np.divide(np.add.reduceat(self.values, firsts, axis=0), np.add.reduceat(self.sums, firsts, axis=0), out=out)


def grid_attention(queries: Floats, kv: PagedKV, layer: int, part: GridPart, out: Floats) -> Callable[[int, int], None]:
    """Work for a share of threads: ``queries`` and ``out`` float32 [blocks * 128, KV heads, group, head_dim], queries scaled.

    A unit is one KV head and half a block of rows.
    """
    _, heads, _, _ = queries.shape
    units = part.blocks * 2 * heads

    def work(index: int, threads: int) -> None:
        for unit in range(*share(units, index, threads)):
            half, head = divmod(unit, heads)
            rows = slice(half * HALF, half * HALF + HALF)
            out[rows, head] = _span_attention(queries[rows, head], kv, layer, part, part.position + half * HALF, head)

    return work


def _span_attention(queries: Floats, kv: PagedKV, layer: int, part: GridPart, position: int, head: int) -> Floats:
    """Rows at ``position`` and on against all positions up to their own. Returns [rows, group, head_dim]."""
    rows, group, dim = queries.shape
    flat = queries.reshape(rows * group, dim)
    highest = np.full((rows * group, 1), -np.inf, np.float32)
    sums = np.zeros((rows * group, 1), np.float32)
    result = np.zeros((rows * group, dim), np.float32)
    end = position + rows
    for start in range(0, end, SPAN):
        length = min(SPAN, end - start)
        keys, values = _span(kv, layer, part, head, start, length)
        scores = np.matmul(flat, keys.T)
        if start + length > position:
            visible = np.arange(start, start + length) <= np.arange(position, end).repeat(group)[:, None]
            scores[~visible] = -np.inf
        new = np.maximum(highest, scores.max(axis=1, keepdims=True))
        scores -= new
        np.exp(scores, out=scores)
        fade = np.exp(highest - new)
        sums *= fade
        sums += scores.sum(axis=1, keepdims=True)
        result *= fade
        result += np.matmul(scores, values)
        highest = new
    result /= sums
    return result.reshape(rows, group, dim)


def _span(kv: PagedKV, layer: int, part: GridPart, head: int, start: int, length: int) -> tuple[Floats, Floats]:
    """Keys and values [length, head_dim] of one head at positions ``start`` and on.

    A short last block has no pages for its pad positions; its first page stands in (hidden from all rows that count).
    """
    first, last = start // kv.page_tokens, -(-(start + length) // kv.page_tokens)
    pages = part.pages[first:last]
    if len(pages) < last - first:
        pages = np.concatenate([pages, np.full(last - first - len(pages), part.pages[0])])
    skip = start - first * kv.page_tokens
    keys, values = (
        kv.gather(layer, pages, which, slice(head, head + 1)).reshape(-1, kv.data.shape[-1])[skip : skip + length] for which in (0, 1)
    )
    return keys, values
