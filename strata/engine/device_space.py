"""The buffers of one stage's windows, allocated once: smaller windows use the first rows of each, so that a captured graph and the next
window share memory and nothing is allocated while windows run.

A memory plan counts them by letting them be allocated on a ``Tally``, so that it cannot differ from what is allocated later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.devices.base import Buffer, Device, HostArray, Stream
from strata.engine.architecture import ExpertConfig
from strata.engine.families import ModelConfig
from strata.engine.graphs import ROW_BUCKETS, row_bucket
from strata.engine.pick_room import Requests
from strata.kernels.attention import allocate_splits
from strata.kernels.draft import clear
from strata.kernels.pages import PageShape
from strata.kernels.route import Groups, Visits, allocate_route, most_tiles
from strata.kernels.store_heads import allocate_queries
from strata.kernels.tensors import Activations, allocate_activations

HEAD_ROWS = 32  # rows of logits computed at once


@dataclass(frozen=True, slots=True)
class WindowSizes:
    """Rows of the largest window, rows of the largest decode window (pad rows included), positions of the longest context."""

    rows: int
    decode_rows: int
    context: int


def window_sizes(chunk: int, max_rows: int, context: int) -> WindowSizes:
    """What a stage's buffers must hold for prompts in chunks and for decode windows of up to ``max_rows`` rows."""
    return WindowSizes(max(ROW_BUCKETS[-1], chunk), row_bucket(max_rows), context)


def zeroed(device: Device, count: int, columns: int, stream: Stream) -> Activations:
    """Activations whose padding is zero, as kernels that write columns only want it."""
    room = allocate_activations(device, count, columns)
    for buffer in (room.codes, room.meta):
        device.upload(buffer, np.zeros(buffer.shape, buffer.dtype), stream)
    stream.synchronize()
    return room


class ExpertSpace:
    """What a window's visits to experts need. ``hidden``: between their two products; ``part``: outputs before they are summed."""

    def __init__(self, device: Device, config: ModelConfig, experts: ExpertConfig, rows: int, stream: Stream) -> None:
        visits = rows * experts.used
        self.visits = Visits(device.allocate((rows, experts.used), np.int32), device.allocate((rows, experts.used), np.float32))
        self.route = allocate_route(device, rows, experts.count, stream)
        self.hidden = zeroed(device, visits, experts.width, stream)
        self.part = device.allocate((visits, config.width), np.float32)
        tiles = most_tiles(rows, experts.used, experts.count)
        self.groups = Groups(device.allocate((visits,), np.int32), device.allocate((tiles, 4), np.int32), 0)


class Workspace:
    """For windows of up to ``sizes``. ``gated``: by width, of a block's network or of the expert that all rows share. ``logits``: on the
    last stage."""

    def __init__(
        self, device: Device, config: ModelConfig, shape: PageShape, sizes: WindowSizes, stream: Stream, is_last: bool
    ) -> None:
        dim, heads, kv_heads, max_rows = config.head_dim, config.num_heads, config.num_kv_heads, sizes.rows
        self.hidden = device.allocate((max_rows, config.width), np.float32)
        self.delta = device.allocate((max_rows, config.width), np.float32)
        self.qkv = device.allocate((max_rows, heads + 2 * kv_heads, dim), np.float32)
        self.normed = zeroed(device, max_rows, config.width, stream)
        self.attended = zeroed(device, max_rows, heads * dim, stream)
        self.gated = {width: zeroed(device, max_rows, width, stream) for width in gated_widths(config)}
        self.experts = None if config.experts is None else ExpertSpace(device, config, config.experts, max_rows, stream)
        self.queries = allocate_queries(device, max_rows, heads, shape)
        self.logits = device.allocate((HEAD_ROWS, config.vocab_size), np.float32) if is_last else None
        self.every = device.allocate((max_rows,), np.int32)
        self.splits = allocate_splits(device, sizes.decode_rows, heads, shape, sizes.context, stream)
        device.upload(self.every, np.arange(max_rows, dtype=np.int32), stream)
        stream.synchronize()


def gated_widths(config: ModelConfig) -> list[int]:
    """Widths of the networks that every row goes through."""
    experts = config.experts
    if experts is None:
        return [config.ffn_width]
    dense = [config.ffn_width] if experts.dense_layers else []
    return sorted({*dense, *([experts.shared_width] if experts.shared_width else [])})


MOST_KEPT = 32  # rows of a slot that wait for their cells, see device_draft.py


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """``rows`` of the largest window, ``slots``, ``pages`` of the pool (the scratch page included), ``max_pages`` of a slot, ``max_drafts``
    of a chain, ``vocab`` that is drafted from."""

    rows: int
    slots: int
    pages: int
    max_pages: int
    max_drafts: int
    vocab: int

    @property
    def max_moves(self) -> int:
        """Of hidden rows after a window: those kept of each slot, one for each page that the window wrote to."""
        return self.rows + self.slots * (MOST_KEPT + 2)


def draft_sizes(rows: int, slots: int, pages: int, context: int, page_tokens: int, max_drafts: int, vocab: int) -> DraftSizes:
    """For conversations of up to ``context`` tokens."""
    return DraftSizes(rows, slots, pages, context // page_tokens + 1, max_drafts, vocab)


class DraftSpace:
    """What a draft block needs beside a Workspace.

    ``store`` float32 [any, width]: hidden rows after the last norm, named by number: those of the window just run from 0 on, the last of
    each page, those of a chain's last step, those kept for each slot.
    """

    def __init__(self, device: Device, config: ModelConfig, sizes: DraftSizes, stream: Stream) -> None:
        self.sizes = sizes
        self.pages_at = sizes.rows
        self.chain_at = self.pages_at + sizes.pages
        self.kept_at = self.chain_at + HEAD_ROWS
        self.store = device.allocate((self.kept_at + sizes.slots * MOST_KEPT, config.width), np.float32)
        clear(device, self.store.view((self.store.shape[0], 4 * config.width), np.int8), 0, 4 * config.width, stream)
        self.joined = zeroed(device, sizes.rows, 2 * config.width, stream)
        self.logits, self.scratch = (device.allocate((HEAD_ROWS, sizes.vocab), np.float32) for _ in range(2))
        self.requests = Requests(device, stream, HEAD_ROWS)
        self.found = device.allocate((sizes.max_drafts, 2 * HEAD_ROWS), np.int32)


class Tally:
    """A device, and its stream, that only adds up the bytes asked for. ``begin`` whatever allocates with ``tally.device, tally.stream``."""

    def __init__(self) -> None:
        self.nbytes = 0

    @property
    def device(self) -> Any:
        return self

    @property
    def stream(self) -> Any:
        return self

    def allocate(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Buffer:
        buffer = Buffer(0, tuple(shape), np.dtype(dtype))
        self.nbytes += buffer.nbytes
        return buffer

    def pinned(self, shape: Sequence[int], dtype: npt.DTypeLike) -> HostArray:
        """Host memory is not counted."""
        return np.empty(0, dtype)

    def event(self) -> None:
        return None

    def upload(self, target: Buffer, source: HostArray, stream: object) -> None:
        return None

    def launch(self, launch: object, arguments: object, stream: object) -> None:
        return None

    def synchronize(self) -> None:
        return None
