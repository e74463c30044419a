"""What a draft block is told of its rows: tokens, places, the hidden rows they are joined with, and by what their drafts are drawn.

A chain of steps changes only what belongs to a row; page tables stay. So the rows of all its steps are sent in one copy, and before each
step its rows are copied, on the device, to where the captured graph looks. Tokens come first, because from the second step on the step
before has left them there. Page tables have places of their own, sent once a window: one line for each slot, and a last one for pad rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from strata.devices.base import Buffer, Device, HostArray, Stream
from strata.engine.device_space import HEAD_ROWS, DraftSizes
from strata.engine.rope import Rope
from strata.engine.window_upload import Ring, WindowRows
from strata.kernels.pages import RowPlaces
from strata.messages import Tokens

WHOLE = 5  # words of sample.cu's requests that change from step to step: a position is among them
RESULTS = 2  # words of a row that a step leaves: its token, and how sure the head is


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for the block. ``lines``: of the page tables; ``sources``: of the hidden rows' store, below 0 for zeros; ``whole`` uint32
    [rows, WHOLE], for rows that draft."""

    tokens: Sequence[int]
    positions: Sequence[int]
    lines: Sequence[int]
    sources: Sequence[int]
    whole: NDArray[np.uint32] | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """Where the metadata of ``rows`` rows, pads included, lies in int32 words. ``pairs``: of RoPE."""

    rows: int
    pairs: int

    @property
    def words(self) -> int:
        return self.rows * (RESULTS + 3 + WHOLE + 2 * self.pairs)

    def spans(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """name -> (first word, shape). ``sure`` and ``turns`` are float32, ``whole`` uint32."""
        shapes: dict[str, tuple[int, ...]] = {name: (self.rows,) for name in ("tokens", "sure", "positions", "lines", "sources")}
        shapes |= {"whole": (self.rows, WHOLE), "turns": (self.rows, self.pairs, 2)}
        firsts = accumulate((math.prod(shape) for shape in shapes.values()), initial=0)
        return {name: (first, shape) for (name, shape), first in zip(shapes.items(), firsts)}

    def fill(self, host: HostArray, rows: Rows, rope: Rope) -> None:
        """``rows`` into ``host``. Pad rows: token 0 with a hidden row of zeros at position 0 of the scratch page."""
        views = {name: host[at : at + math.prod(shape)].reshape(shape) for name, (at, shape) in self.spans().items()}
        count = len(rows.positions)
        for name, pad in (("tokens", 0), ("positions", 0), ("lines", HEAD_ROWS), ("sources", -1)):
            views[name][:count] = getattr(rows, name)
            views[name][count:] = pad
        views["whole"][:] = 0
        if rows.whole is not None:
            views["whole"].view(np.uint32)[:count] = rows.whole
        turns = rope.turns(views["positions"].astype(np.int64))
        views["turns"].view(np.float32)[:] = turns.view(np.float32).reshape(views["turns"].shape)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows in device memory. ``results`` int32 [2, rows]: ``tokens``, which a step overwrites with its picks, and ``sure`` float32."""

    window: WindowRows
    sources: Buffer
    whole: Buffer
    results: Buffer
    sure: Buffer


class DraftSender:
    """Sends rows of up to ``sizes``; ``every`` int32 [rows] counts from 0."""

    def __init__(self, device: Device, stream: Stream, sizes: DraftSizes, rope: Rope, every: Buffer, scratch_page: int) -> None:
        self._device, self._stream, self._rope, self._every = device, stream, rope, every
        self.pairs = len(rope.frequencies)
        widest, step = Header(sizes.rows, self.pairs).words, Header(HEAD_ROWS, self.pairs).words
        self._header = device.allocate((widest,), np.int32)
        self._staged = device.allocate((sizes.max_drafts * step,), np.int32)
        self._tables = device.allocate((HEAD_ROWS + 1, sizes.max_pages), np.int32)
        self._moves = device.allocate((sizes.max_moves, 2), np.int32)
        self._ring = Ring(device, stream, max(widest, sizes.max_drafts * step))
        self._table_ring = Ring(device, stream, HEAD_ROWS * sizes.max_pages)
        self._move_ring = Ring(device, stream, self._moves.size)
        device.upload(self._tables, np.full(self._tables.shape, scratch_page, np.int32), stream)
        stream.synchronize()

    def send_tables(self, tables: Sequence[Tokens]) -> None:
        """Line i is ``tables[i]``, until others are sent."""
        width = self._tables.shape[1]
        with self._table_ring.turn() as host:
            lines = host[: len(tables) * width].reshape(-1, width)
            for line, pages in zip(lines, tables):
                line[: len(pages)] = pages[:width]
            self._upload(self._tables, lines.reshape(-1))

    def send(self, rows: Rows, count: int) -> DraftRows:
        """Rows for one run, padded to ``count``."""
        header = Header(count, self.pairs)
        with self._ring.turn() as host:
            header.fill(host, rows, self._rope)
            self._upload(self._header, host[: header.words])
        return self.rows(header, 0)

    def send_steps(self, steps: Sequence[tuple[Header, Rows]]) -> Iterator[Header]:
        """The rows of a chain's steps in one copy; then, each time it is asked, the next step's to where its graph looks."""
        with self._ring.turn() as host:
            firsts = [0, *accumulate(header.words for header, _ in steps)]
            for first, (header, rows) in zip(firsts, steps):
                header.fill(host[first : first + header.words], rows, self._rope)
            self._upload(self._staged, host[: firsts[-1]])
        return self._steps(firsts, [header for header, _ in steps])

    def _steps(self, firsts: Sequence[int], headers: Sequence[Header]) -> Iterator[Header]:
        for number, (first, header) in enumerate(zip(firsts, headers)):
            skipped = RESULTS * header.rows if number else 0
            size = header.words - skipped
            source = self._staged.view((size,), offset=4 * (first + skipped))
            self._device.copy(self._header.view((size,), offset=4 * skipped), source, self._stream)
            yield header

    def _upload(self, target: Buffer, words: HostArray) -> None:
        self._device.upload(target.view((len(words),)), words, self._stream)

    def rows(self, header: Header, context: int) -> DraftRows:
        """The rows last sent, as kernels take them; ``context`` as for WindowRows."""

        def part(name: str, dtype: type = np.int32) -> Buffer:
            first, shape = header.spans()[name]
            return self._header.view(shape, dtype, 4 * first)

        places = RowPlaces(part("positions"), part("lines"), self._tables)
        window = WindowRows(header.rows, part("tokens"), places, part("turns", np.float32), self._every.rows(0, header.rows), context)
        results = self._header.view((RESULTS, header.rows))
        return DraftRows(window, part("sources"), part("whole", np.uint32), results, part("sure", np.float32))

    def send_moves(self, *lists: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Lists of (from, to) in one copy: int32 [count, 2] each, good until the next are sent."""
        edges = [0, *accumulate(len(moves) for moves in lists)]
        if edges[-1]:
            with self._move_ring.turn() as host:
                words = host[: 2 * edges[-1]]
                words.reshape(-1, 2)[:] = [move for moves in lists for move in moves]
                self._upload(self._moves, words)
        return [self._moves.rows(first, end) for first, end in zip(edges, edges[1:])]
