"""Causal attention over pages, for decode rows and for prompts (attention.cu): the same bits for a row in both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels.check import Shapes, ceil_div, int32
from strata.kernels.pages import Pages, PageShape, RowPlaces, scale_group
from strata.kernels.store_heads import Queries
from strata.kernels.tensors import Activations

SPLIT = 256  # positions
THREADS = 128
COLUMNS = 8  # of a tile
MAX_GROUP = 16  # query heads that can share a KV head
ALL_SPLITS = 1 << 24


@dataclass(frozen=True, slots=True)
class SplitSpace:
    """Where the splits of decode rows wait for each other.

    ``partial`` float32 [rows, heads, splits, head_dim + 2]; ``arrived`` int32 [rows, kv_heads], zero between launches.
    """

    partial: Buffer
    arrived: Buffer


def num_splits(context: int) -> int:
    """Splits of a context of so many positions."""
    return ceil_div(context, SPLIT)


def allocate_splits(device: Device, rows: int, heads: int, shape: PageShape, context: int, stream: Stream) -> SplitSpace:
    """Room for ``rows`` rows of up to ``context`` positions."""
    partial = device.allocate((rows, heads, num_splits(context), shape.head_dim + 2), np.float32)
    arrived = device.allocate((rows, shape.kv_heads), np.int32)
    device.upload(arrived, np.zeros(arrived.shape, np.int32), stream)
    stream.synchronize()
    return SplitSpace(partial, arrived)


def kernel_name(shape: PageShape, group: int, prompt: bool) -> KernelName:
    """``group``: query heads per KV head. A prompt's tile has 16 columns, a decode row's as few as hold its group."""
    tiles = 2 if prompt else ceil_div(group, COLUMNS)
    return KernelName("attention", f"attention<{shape.head_dim}, {tiles}{shape.template_end}>")


def attention(
    device: Device, queries: Queries, places: RowPlaces, layer: int, pages: Pages, splits: SplitSpace | None, out: Activations,
    stream: Stream,
) -> None:  # fmt: skip
    """``out`` [rows, heads * head_dim] = softmax(q k) v over positions 0 .. positions[i] of each row, quantised.

    With ``splits`` (decode): rows of any slots, each up to the context that ``splits`` has room for. Without (prompts): rows of one slot at
    rising positions, in tiles that read keys and values once for several rows. Padding of ``out`` must be zero; it is not written.
    """
    shape, shapes = pages.shape, Shapes("attention", head_dim=pages.shape.head_dim)
    shapes.match("queries", queries.codes, np.int8, "rows", "heads", shape.query_bytes)
    rows, heads, kv_heads = shapes["rows"], shapes["heads"], shape.kv_heads
    shapes.match("scales", queries.scales, np.float32, "rows", "heads", shape.head_dim // scale_group(shape.head_dim))
    places.check(shapes)
    out.check("attention")
    group = heads // kv_heads
    shapes.require(heads % kv_heads == 0 and group <= MAX_GROUP, f"{heads} heads over {kv_heads} KV heads")
    shapes.require(out.count == rows and out.columns == heads * shape.head_dim, f"out is {out.count} x {out.columns}")
    if splits is None:
        partial, arrived, max_splits = queries.scales, places.positions, 1  # not touched
        per_block, rows_per_tile, blocks = ALL_SPLITS, 2 * COLUMNS // group, 1
    else:
        shapes.match("partial", splits.partial, np.float32, "room", "heads", "splits", shape.head_dim + 2)
        shapes.match("arrived", splits.arrived, np.int32, "room", kv_heads)
        shapes.require(rows <= shapes["room"], f"{rows} rows in a space for {shapes['room']}")
        partial, arrived, max_splits = splits.partial, splits.arrived, shapes["splits"]
        per_block, rows_per_tile, blocks = 1, 1, max_splits
    grid = (blocks, kv_heads, ceil_div(rows, rows_per_tile))
    sizes = [int32(rows), int32(heads), int32(kv_heads), int32(rows_per_tile)]
    where = [places.positions, places.row_table, places.tables, int32(shapes["max_pages"]), *pages.arguments(layer)]
    scratch = [int32(per_block), partial, int32(max_splits), arrived]
    arguments = [queries.codes, queries.scales, *sizes, *where, *scratch, out.codes, out.meta, int32(out.width)]
    device.launch(Launch(kernel_name(shape, group, splits is None), grid, THREADS), arguments, stream)
