"""What a window tells a device, in one copy: tokens, positions, page tables, RoPE turns, and which rows need logits.

Two pinned buffers take turns; one is written again only when the event behind its last copy has passed, so the copy of one window and the
filling of the next overlap. Sizes alone say where a field lies, so a graph captured with them reads the next window's values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from strata.devices.base import Buffer, Device, HostArray, Stream
from strata.engine.graphs import ROW_BUCKETS
from strata.engine.rope import Rope
from strata.engine.rows import wanted_rows
from strata.kernels.attention import SPLIT
from strata.kernels.pages import RowPlaces
from strata.messages import Window

BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Fields:
    """Where a window's metadata lies in a block of int32 words.

    ``rows``: pad rows included. ``tables``: lines of page ids, ``max_pages`` each. ``pairs``: RoPE pairs.
    """

    rows: int
    tables: int
    max_pages: int
    pairs: int

    @property
    def words(self) -> int:
        return self.rows * (4 + 2 * self.pairs) + self.tables * self.max_pages

    def spans(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """name -> (first word, shape). ``turns`` are float32."""
        shapes: dict[str, tuple[int, ...]] = {name: (self.rows,) for name in ("tokens", "positions", "row_table", "wanted")}
        shapes["tables"] = (self.tables, self.max_pages)
        shapes["turns"] = (self.rows, self.pairs, 2)
        spans, at = {}, 0
        for name, shape in shapes.items():
            spans[name] = (at, shape)
            at += math.prod(shape)
        return spans


@dataclass(frozen=True, slots=True)
class WindowRows:
    """One window in device memory: ``tokens`` int32 [rows], where they are, ``turns`` float32 [rows, pairs, 2], ``wanted`` int32 [rows].

    ``context``: positions that the grid of a decode window's attention covers; 0 for a prompt chunk.
    """

    count: int
    tokens: Buffer
    places: RowPlaces
    turns: Buffer
    wanted: Buffer
    context: int


def widest(chunk: int, context: int, page_tokens: int, pairs: int) -> int:
    """Words of the largest window: a chunk, or a decode window whose attention covers the last context bucket."""
    pages = -(-(context + 1) // page_tokens) + SPLIT // page_tokens
    return Fields(max(ROW_BUCKETS[-1], chunk), ROW_BUCKETS[-1], pages, pairs).words


def fill(host: HostArray, window: Window, fields: Fields, rope: Rope, scratch_page: int) -> None:
    """A window's metadata into ``host`` (int32 words). Pad rows: token 0 at position 0 of the scratch page.

    Line i of the tables belongs to segment i; pad rows have the last line, which a window with pad rows leaves to them. Behind the rows
    that are wanted come all others: a graph computes logits for every row, and no two blocks of its last norm may have the same one.
    """
    views = {name: host[at : at + math.prod(shape)].reshape(shape) for name, (at, shape) in fields.spans().items()}
    for name in ("tokens", "positions"):
        views[name][:] = 0
    views["row_table"][:] = fields.tables - 1
    views["tables"][:] = scratch_page
    row = 0
    for line, segment in enumerate(window.segments):
        stop = row + len(segment.tokens)
        pages = segment.pages[: fields.max_pages]
        views["tokens"][row:stop] = segment.tokens
        views["positions"][row:stop] = np.arange(segment.start, segment.end)
        views["row_table"][row:stop] = line
        views["tables"][line, : len(pages)] = pages
        row = stop
    wanted = np.array(wanted_rows(window), np.int32)
    views["wanted"][:] = np.concatenate([wanted, np.setdiff1d(np.arange(fields.rows, dtype=np.int32), wanted, assume_unique=True)])
    turns = rope.turns(views["positions"].astype(np.int64))
    views["turns"].view(np.float32)[:] = turns.view(np.float32).reshape(fields.rows, fields.pairs, 2)


class Ring:
    """Pinned buffers of int32 ``words`` that take turns on their way to ``stream``'s device."""

    def __init__(self, device: Device, stream: Stream, words: int) -> None:
        self._stream = stream
        self._buffers = [(device.pinned((words,), np.int32), device.event()) for _ in range(BUFFERS)]
        self._turn = 0

    @contextmanager
    def turn(self) -> Iterator[HostArray]:
        """A buffer to fill and to enqueue copies of within. Waits only for the copies before the last ones."""
        host, event = self._buffers[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        event.synchronize()
        yield host
        self._stream.record(event)


class WindowSender:
    """Sends windows of up to ``words`` words on ``stream``."""

    def __init__(self, device: Device, stream: Stream, words: int) -> None:
        self._device, self._stream = device, stream
        self._block = device.allocate((words,), np.int32)
        self._ring = Ring(device, stream, words)

    def send(self, window: Window, fields: Fields, rope: Rope, scratch_page: int) -> None:
        """Enqueues the copy of ``window``'s metadata."""
        with self._ring.turn() as host:
            fill(host, window, fields, rope, scratch_page)
            self._device.upload(self._block.view((fields.words,)), host[: fields.words], self._stream)

    def rows(self, fields: Fields, context: int) -> WindowRows:
        """The window last sent, as kernels take it."""

        def part(name: str, dtype: type = np.int32) -> Buffer:
            first, shape = fields.spans()[name]
            return self._block.view(shape, dtype, 4 * first)

        places = RowPlaces(part("positions"), part("row_table"), part("tables"))
        return WindowRows(fields.rows, part("tokens"), places, part("turns", np.float32), part("wanted"), context)
