"""A window as rows: which token at which position writes where, reads which pages, and goes through which arithmetic.

Two arithmetics on the CPU. *Row* parts are computed row by row, each bit independent of the others. *Grid* parts are whole blocks of
128 rows, on an absolute grid of positions, padded where the window covers a block only in part: a product of one fixed shape gives a
row the same bits whatever the other rows hold, so only the row's place on the grid counts. Decode windows are row parts;
prompts are grid parts, but for blocks of which the window holds only some rows (``short_rows``): those are cheaper row by row.

The rule looks at start and end of what is read in one block alone. Chunks end at block ends or at the prompt's end, so the way
a prompt is cut, and what runs beside it, change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from strata.messages import Segment, Window

GRID = 128


def wanted_rows(window: Window) -> tuple[int, ...]:
    """The rows of the window (counted over its segments in order) whose logits the last stage gives, rising.

    All rows of a segment that asks for prompt logprobs; else the row of each pick: the last one, and one before each draft.
    """
    wanted: list[int] = []
    base = 0
    for segment in window.segments:
        rows = len(segment.tokens)
        if segment.prompt_logprobs >= 0:
            wanted.extend(range(base, base + rows))
        elif segment.sampling is not None:
            wanted.extend(range(base + rows - segment.num_drafts - 1, base + rows))
        base += rows
    return tuple(wanted)


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` rows at consecutive positions of one slot, from ``position``; ``pages`` up to the last one's."""

    position: int
    count: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowPart:
    """Rows ``start .. stop - 1`` of the layout, computed one by one: ``runs`` in order."""

    start: int
    stop: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class GridPart:
    """Blocks of 128 layout rows from ``start``: position ``position`` and on, of one slot whose context's pages are ``pages``."""

    start: int
    blocks: int
    position: int
    pages: NDArray[np.int64]

    @property
    def stop(self) -> int:
        return self.start + self.blocks * GRID


@dataclass(frozen=True, slots=True)
class Layout:
    """A window's rows as arrays: real rows and the pad rows of grid parts. All int64.

    ``tokens``, ``positions`` [layout rows] (pads: token 0); ``real`` [rows]: where the window's rows are; ``pages``,
    ``offsets`` [rows]: where they write; ``fresh``: pages whose first position is written, which must be cleared before.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    real: NDArray[np.int64]
    pages: NDArray[np.int64]
    offsets: NDArray[np.int64]
    fresh: NDArray[np.int64]
    parts: tuple[RowPart | GridPart, ...]

    @property
    def padded(self) -> bool:
        return len(self.real) != len(self.tokens)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Positions ``start .. stop - 1`` of a segment, all of one arithmetic."""

    segment: Segment
    start: int
    stop: int
    on_grid: bool


def _pieces(segment: Segment, short_rows: int | None) -> Iterator[_Piece]:
    """Cut a segment where the arithmetic changes: a short first block, whole or long blocks, a short last block."""
    if short_rows is None:
        yield _Piece(segment, segment.start, segment.end, False)
        return
    first_end = min(segment.start - segment.start % GRID + GRID, segment.end)
    last_start = max(segment.end - 1 - (segment.end - 1) % GRID, segment.start)
    long_from = segment.start if first_end - segment.start > short_rows else first_end
    long_to = segment.end if segment.end - last_start > short_rows else last_start
    if long_from >= long_to:
        long_from = long_to = segment.end
    for start, stop, on_grid in (
        (segment.start, long_from, False), (long_from, long_to, True), (long_to, segment.end, False),
    ):  # fmt: skip
        if start < stop:
            yield _Piece(segment, start, stop, on_grid)


class _Builder:
    """Collects the layout piece by piece."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.real: list[int] = []
        self.parts: list[RowPart | GridPart] = []

    def grid(self, piece: _Piece) -> None:
        start, stop, base = piece.start - piece.start % GRID, piece.stop + -piece.stop % GRID, len(self.tokens)
        segment = piece.segment
        self.real += range(base + piece.start - start, base + piece.stop - start)
        self.tokens += [0] * (piece.start - start)
        self.tokens += segment.tokens[piece.start - segment.start : piece.stop - segment.start]
        self.tokens += [0] * (stop - piece.stop)
        self.positions += range(start, stop)
        pages = np.array(segment.pages[: -(-piece.stop // self.page_tokens)], np.int64)
        self.parts.append(GridPart(base, (stop - start) // GRID, start, pages))

    def rows(self, pieces: list[_Piece]) -> None:
        base = len(self.tokens)
        runs = []
        for piece in pieces:
            segment = piece.segment
            self.tokens += segment.tokens[piece.start - segment.start : piece.stop - segment.start]
            self.positions += range(piece.start, piece.stop)
            runs.append(Run(piece.start, piece.stop - piece.start, segment.pages[: (piece.stop - 1) // self.page_tokens + 1]))
        self.real += range(base, len(self.tokens))
        self.parts.append(RowPart(base, len(self.tokens), tuple(runs)))


def plan(window: Window, page_tokens: int, short_rows: int | None) -> Layout:
    """The layout of ``window``. ``short_rows``: up to so many rows of a block go row by row; None: all do, prompts too."""
    builder = _Builder(page_tokens)
    short = short_rows if window.kind == "prompt" else None
    pieces = [piece for segment in window.segments for piece in _pieces(segment, short)]
    for on_grid, group in groupby(pieces, lambda piece: piece.on_grid):
        if on_grid:
            for piece in group:
                builder.grid(piece)
        else:
            builder.rows(list(group))
    writes = [divmod(position, page_tokens) for segment in window.segments for position in range(segment.start, segment.end)]
    owners = [segment for segment in window.segments for _ in segment.tokens]
    pages = [segment.pages[index] for segment, (index, _) in zip(owners, writes, strict=True)]
    return Layout(
        tokens=np.array(builder.tokens, np.int64),
        positions=np.array(builder.positions, np.int64),
        real=np.array(builder.real, np.int64),
        pages=np.array(pages, np.int64),
        offsets=np.array([offset for _, offset in writes], np.int64),
        fresh=np.array([page for page, (_, offset) in zip(pages, writes, strict=True) if offset == 0], np.int64),
        parts=tuple(builder.parts),
    )
