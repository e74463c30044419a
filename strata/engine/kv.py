"""A stage's paged KV cache: the keys and values of its layers, in pages of a fixed number of positions.

Layout: one array [layers, 2 (keys, values), pages, KV heads, page positions, head_dim]; a page of one layer's keys is contiguous, and of
one head a small matrix. ``int8`` keeps q = round(x / scale) with one fp16 scale per token and head, in a second array without
the last axis; the scale is rounded before q is, so that x ~ q * scale holds as well as it can.

Rules. A page is cleared when its first position is written: what an earlier owner left (perhaps NaN) must not meet the zero
weight of a masked position. The arrays come uninitialised, so a page costs memory only once it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strata.engine.families import ModelConfig

KVKind = Literal["f32", "int8"]
Floats = NDArray[np.float32]
Pages = NDArray[np.int64] | slice
PAGE_TOKENS = 64


def page_bytes(config: ModelConfig, num_layers: int, page_tokens: int, kind: KVKind) -> int:
    """Bytes of one page over ``num_layers`` layers."""
    per_head = config.head_dim * 4 if kind == "f32" else config.head_dim + 2
    return num_layers * 2 * config.num_kv_heads * page_tokens * per_head


class PagedKV:
    """``num_pages`` pages for ``num_layers`` layers of the model ``config``. Wherever ``kv`` is asked for, 0 is keys and 1 values."""

    def __init__(self, config: ModelConfig, num_layers: int, num_pages: int, page_tokens: int = PAGE_TOKENS, kind: KVKind = "f32") -> None:
        """Raises ValueError for an unknown kind, MemoryError if the address space lacks room."""
        if kind not in ("f32", "int8"):
            raise ValueError(f"KV cache of kind {kind!r}; the CPU keeps f32 or int8")
        self.kind, self.page_tokens, self.num_pages = kind, page_tokens, num_pages
        self.heads, self.head_dim = config.num_kv_heads, config.head_dim
        shape = (num_layers, 2, num_pages, self.heads, page_tokens, self.head_dim)
        self.data = np.empty(shape, np.float32 if kind == "f32" else np.int8)
        self.scales = np.empty(shape[:-1], np.float16) if kind == "int8" else None

    def clear(self, pages: NDArray[np.int64], layers: slice = slice(None)) -> None:
        """Zero these pages in ``layers``, by default in all."""
        self.data[layers, :, pages] = 0
        if self.scales is not None:
            self.scales[layers, :, pages] = 0

    def write(self, layer: int, pages: NDArray[np.int64], offsets: NDArray[np.int64], rows: Floats) -> None:
        """Store keys and values ``rows`` float32 [rows, 2, KV heads, head_dim], row i at position ``offsets[i]`` of ``pages[i]``."""
        if self.scales is None:
            self.data[layer][:, pages, :, offsets] = rows
            return
        scales = (np.abs(rows).max(axis=-1) / 127).astype(np.float16)
        self.scales[layer][:, pages, :, offsets] = scales
        # A row of zeros, or one whose scale underflows fp16, is stored as zeros.
        inverse = np.divide(1, scales, dtype=np.float32, where=scales > 0, out=np.zeros(scales.shape, np.float32))
        levels = np.rint(rows * inverse[..., None])
        self.data[layer][:, pages, :, offsets] = np.clip(levels, -127, 127, out=levels)

    def levels(self, layer: int, kv: int, pages: Pages, out: Floats) -> Floats:
        """What some pages hold, float32 [pages, KV heads, page_tokens, head_dim]: values, or int8 levels unscaled.

        Written to ``out``; but a slice of pages of an f32 cache is returned as it lies there.
        """
        stored = self.data[layer, kv]
        if isinstance(pages, slice):
            if self.scales is None:
                return stored[pages]
            np.copyto(out, stored[pages])
        elif self.scales is None:
            # mode: "raise" would first copy to a buffer of its own.
            np.take(stored, pages, axis=0, out=out, mode="clip")
        else:
            np.copyto(out, np.take(stored, pages, axis=0))
        return out

    def level_scales(self, layer: int, kv: int, pages: Pages) -> Floats | None:
        """What to multiply ``levels`` by: float32 [pages, KV heads, 1, page_tokens], None for an f32 cache."""
        if self.scales is None:
            return None
        return self.scales[layer, kv][pages][:, :, None].astype(np.float32)

    def head(self, layer: int, kv: int, pages: NDArray[np.int64], head: int) -> Floats:
        """A copy of one KV head of some pages: float32 [pages * page_tokens, head_dim]."""
        data = self.data[layer, kv, pages, head].reshape(-1, self.head_dim)
        if self.scales is None:
            return data
        return data * self.scales[layer, kv, pages, head].reshape(-1, 1).astype(np.float32)

    def copy_out(self, pages: Sequence[int]) -> tuple[NDArray, ...]:
        """A host image of whole pages, in their order."""
        index = np.array(pages, np.int64)
        return (self.data[:, :, index],) if self.scales is None else (self.data[:, :, index], self.scales[:, :, index])

    def copy_in(self, image: tuple[NDArray, ...], pages: Sequence[int]) -> None:
        """Write an image's first pages to ``pages`` (all of them, or as many as are wanted). Raises ValueError if it has fewer."""
        index = np.array(pages, np.int64)
        if image[0].shape[2] < len(index):
            raise ValueError(f"an image of {image[0].shape[2]} pages does not fill {len(index)} pages")
        self.data[:, :, index] = image[0][:, :, :len(index)]
        if self.scales is not None:
            self.scales[:, :, index] = image[1][:, :, :len(index)]
