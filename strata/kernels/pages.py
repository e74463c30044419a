"""The pool of KV pages on a device: sizes and addresses, as cuda_src/include/pages.cuh lays them out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.devices.base import Buffer
from strata.kernels.check import Shapes, int32


def scale_group(head_dim: int) -> int:
    """Dimensions that share one scale. Raises ValueError for a head that the kernels cannot hold."""
    if head_dim % 32 or not 32 <= head_dim <= 256:
        raise ValueError(f"heads of {head_dim} dimensions are not served on a device: a multiple of 32 up to 256 is")
    return 64 if head_dim % 64 == 0 else 32


@dataclass(frozen=True, slots=True)
class PageShape:
    """What one page holds: ``page_tokens`` positions of ``layers`` layers with ``kv_heads`` heads of ``head_dim``.

    ``kind``: int8 with a float16 scale for each group of dimensions, or f16.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    kind: str = "int8"

    def __post_init__(self) -> None:
        scale_group(self.head_dim)
        if self.page_tokens % 32:
            raise ValueError(f"pages of {self.page_tokens} positions: a multiple of 32 is needed on a device")

    @property
    def query_bytes(self) -> int:
        """Of one query head as attention reads it, its scales not counted."""
        return self.head_dim * (2 if self.kind == "f16" else 1)

    @property
    def template_end(self) -> str:
        """What the kernels' template arguments end with for pages of this kind."""
        return ", true" if self.kind == "f16" else ""

    @property
    def head_bytes(self) -> int:
        """Of keys, values and their scales of one head in one layer."""
        if self.kind == "f16":
            return 4 * self.page_tokens * self.head_dim
        return 2 * self.page_tokens * (self.head_dim + 2 * (self.head_dim // scale_group(self.head_dim)))

    @property
    def layer_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        return self.layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class Pages:
    """The pool of a stage: ``data`` int8 [pages, page_bytes]."""

    shape: PageShape
    data: Buffer

    def arguments(self, layer: int) -> list[Buffer | np.int64 | np.int32]:
        """The pool as a kernel's parameters, for one layer of the stage."""
        Shapes("pages").match("pool", self.data, np.int8, "pages", self.shape.page_bytes)
        if not 0 <= layer < self.shape.layers:
            raise IndexError(f"layer {layer} of {self.shape.layers}")
        offset = np.int64(layer * self.shape.layer_bytes)
        return [self.data, np.int64(self.shape.page_bytes), offset, int32(self.shape.page_tokens)]


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where the rows of a window are: ``positions`` int32 [rows]; row i belongs to line ``tables[row_table[i]]`` of page ids.

    ``row_table`` int32 [rows], ``tables`` int32 [lines, max_pages]. All in device memory, so that a replayed graph sees new values.
    """

    positions: Buffer
    row_table: Buffer
    tables: Buffer

    def check(self, shapes: Shapes) -> None:
        shapes.match("positions", self.positions, np.int32, "rows")
        shapes.match("row_table", self.row_table, np.int32, "rows")
        shapes.match("tables", self.tables, np.int32, "lines", "max_pages")
