"""q/k norm, RoPE, quantisation and the append to the page in one launch (store_heads.cu)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels.check import Shapes, ceil_div, int32
from strata.kernels.pages import Pages, PageShape, RowPlaces, scale_group

HEADS_PER_BLOCK = 4


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries: ``codes`` int8 [rows, heads, head_dim] and ``scales`` float32 [rows, heads, head_dim / group].

    For f16 pages the bytes of float16 [rows, heads, head_dim] are ``codes``, and ``scales`` is not touched.
    """

    codes: Buffer
    scales: Buffer


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the q and k norms, float32 [head_dim] each."""

    q: Buffer
    k: Buffer
    eps: float


def allocate_queries(device: Device, rows: int, heads: int, shape: PageShape) -> Queries:
    groups = shape.head_dim // scale_group(shape.head_dim)
    return Queries(device.allocate((rows, heads, shape.query_bytes), np.int8), device.allocate((rows, heads, groups), np.float32))


def kernel_name(shape: PageShape) -> KernelName:
    return KernelName("store_heads", f"store_heads<{shape.head_dim}{shape.template_end}>")


def store_heads(
    device: Device, qkv: Buffer, turns: Buffer, norms: HeadNorms | None, places: RowPlaces, layer: int, pages: Pages, queries: Queries,
    stream: Stream,
) -> None:  # fmt: skip
    """Rows of ``qkv`` float32 [rows, heads + 2 kv_heads, head_dim] into ``queries`` and, at ``places``, into ``pages``.

    ``turns`` float32 [rows, pairs, 2]: cosine, sine of each pair (2i, 2i + 1) of the first 2 pairs dimensions.
    """
    shape, shapes = pages.shape, Shapes("store_heads", head_dim=pages.shape.head_dim)
    groups = shape.head_dim // scale_group(shape.head_dim)
    shapes.match("queries", queries.codes, np.int8, "rows", "heads", shape.query_bytes)
    shapes.match("scales", queries.scales, np.float32, "rows", "heads", groups)
    shapes.match("qkv", qkv, np.float32, "rows", shapes["heads"] + 2 * shape.kv_heads, "head_dim")
    shapes.match("turns", turns, np.float32, "rows", "pairs", 2)
    places.check(shapes)
    shapes.require(2 * shapes["pairs"] <= shape.head_dim, f"{shapes['pairs']} pairs in a head of {shape.head_dim}")
    for name, gamma in () if norms is None else (("q_norm", norms.q), ("k_norm", norms.k)):
        shapes.match(name, gamma, np.float32, "head_dim")
    gammas = [turns, turns, np.int32(0), np.float32(0)] if norms is None else [norms.q, norms.k, np.int32(1), np.float32(norms.eps)]
    sizes = [int32(shapes["pairs"]), int32(shapes["heads"]), int32(shape.kv_heads), np.float32(shape.head_dim**-0.5)]
    where = [places.positions, places.row_table, places.tables, int32(shapes["max_pages"])]
    grid = (ceil_div(shapes["heads"] + 2 * shape.kv_heads, HEADS_PER_BLOCK), shapes["rows"], 1)
    arguments = [qkv, *gammas, turns, *sizes, *where, queries.codes, queries.scales, *pages.arguments(layer)]
    device.launch(Launch(kernel_name(shape), grid, 32 * HEADS_PER_BLOCK), arguments, stream)
