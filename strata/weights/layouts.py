"""The few layouts that kernels read: what a device keeps of a tensor, and which stored formats fit it without loss.

A layout's weights are exact in three steps, each of them exact or rounded once in float32, in this order:
``weight = scale * (MUL * code + ADD) [+ offset]`` with integer codes; ``scale`` and ``offset`` belong to a scale group of 16 or
32 weights and are a float16 times a small integer, or the float16 alone. The integer part is what int8 dot products see.

============= ===== ====== ============================== ============= =========================================
layout        bits  groups scale; offset                  MUL, ADD      holds
============= ===== ====== ============================== ============= =========================================
packed3       3.44  32     d[256] * (1 + 2 s)             1, 0          IQ3_S as stored, in aligned planes
odd4          4.31  32     d[256] * step                  2, -15        IQ3_S
flat4         4.5   32     d[32]                          1, -8         Q4_0, Q2_0
affine4       5     32     d[32]; m[32]                   1, 0          Q4_1
super4        4.63  32     d[256] * step; -m[256] * step  1, 0          Q4_K
flat8         8.5   32     d[32]                          1, 0          Q8_0, Q5_0, IQ4_NL
affine8       9     32     d[32]; m[32]                   1, 0          Q5_1
super8        8.56  16     unit * d[256] * step           1, 0          Q6_K, Q3_K, IQ4_XS, IQ3_XXS, IQ2_*
affine_super8 9.13  16     d[256] * step; -m[256] * step  1, 0          Q5_K, Q2_K
half          16    -      -                              -             F16; BF16 and F32 rounded to float16
============= ===== ====== ============================== ============= =========================================

Planes of a tensor [rows, columns], each a C array with one line per row (``width`` = columns rounded up to 64, padded with
weights of zero; groups of 32 in ``width``):
  codes   uint8. 4 bit: 16 bytes a group; byte 4w + j holds weight 8w + j (low nibble) and 8w + 4 + j. 8 bit: int8 in order.
          packed3: the grid indices' low bytes (8 a group), then, after all groups, the sign bytes (4 a group). half: float16.
  scales  float16 as uint16: d, or pairs (d, m), one per 256 or 32 weights.
  steps   uint8 or int8: one (or a pair: scale, offset) per scale group. packed3: a byte per group with the indices' ninth bits,
          then, after all groups, a nibble per group with s (even group low).
The same description is read by cuda_src/include/layouts.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.weights.grids import gather, grids, signs

GROUP = 32
PAIR = 64  # the unit that a kernel lane reads: rows are padded to a multiple of it
SUPER = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout. ``bits`` per code; ``group``: weights per scale; ``affine``: has offsets; ``stepped``: scales have steps."""

    name: str
    bits: int
    group: int
    affine: bool = False
    stepped: bool = False
    multiply: int = 1
    add: int = 0

    def plane_shapes(self, rows: int, width: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Shapes of codes (bytes), scales (float16) and steps (bytes)."""
        per_scale = SUPER if self.stepped else GROUP
        parts = 2 if self.affine else 1
        if self is HALF:
            return (rows, 2 * width), (rows, 0), (rows, 0)
        if self is PACKED3:
            return (rows, width // 32 * 12), (rows, width // SUPER), (rows, width // 64 * 3)
        steps = parts * width // self.group if self.stepped else 0
        return (rows, width * self.bits // 8), (rows, parts * width // per_scale), (rows, steps)

    def bytes(self, rows: int, width: int) -> int:
        """Bytes of a tensor in this layout."""
        (_, codes), (_, scales), (_, steps) = self.plane_shapes(rows, width)
        return rows * (codes + 2 * scales + steps)


PACKED3 = Layout("packed3", 3, 32, stepped=True)
ODD4 = Layout("odd4", 4, 32, stepped=True, multiply=2, add=-15)
FLAT4 = Layout("flat4", 4, 32, add=-8)
AFFINE4 = Layout("affine4", 4, 32, affine=True)
SUPER4 = Layout("super4", 4, 32, affine=True, stepped=True)
FLAT8 = Layout("flat8", 8, 32)
AFFINE8 = Layout("affine8", 8, 32, affine=True)
SUPER8 = Layout("super8", 8, 16, stepped=True)
AFFINE_SUPER8 = Layout("affine_super8", 8, 16, affine=True, stepped=True)
HALF = Layout("half", 16, 1)

LAYOUTS = {x.name: x for x in (PACKED3, ODD4, FLAT4, AFFINE4, SUPER4, FLAT8, AFFINE8, SUPER8, AFFINE_SUPER8, HALF)}


@dataclass(frozen=True, slots=True)
class Recoded:
    """A tensor in a layout, on the host. ``unit``: the power of two in super8's scales, else 1. ``columns`` <= ``width``."""

    layout: Layout
    columns: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.uint16]
    steps: NDArray[np.uint8]
    unit: float = 1.0

    @property
    def rows(self) -> int:
        return len(self.codes)

    @property
    def width(self) -> int:
        return padded(self.columns)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.steps.nbytes


def padded(columns: int) -> int:
    """``columns`` rounded up to whole pairs of groups."""
    return -(-columns // PAIR) * PAIR


def integers(tensor: Recoded) -> NDArray[np.int32]:
    """MUL * code + ADD of every weight: int32 [rows, width], what the int8 products multiply with. Not for half."""
    rows, width = tensor.rows, tensor.width
    layout = tensor.layout
    if layout is PACKED3:
        groups = width // GROUP
        high = np.unpackbits(tensor.steps[:, :groups], axis=1, bitorder="little")
        index = tensor.codes[:, : 8 * groups] | (high.astype(np.uint16) << 8)
        codes = gather(grids()["iq3_s"], index) * gather(signs(), tensor.codes[:, 8 * groups :])
    elif layout.bits == 4:
        words = tensor.codes.reshape(rows, -1, 4)
        codes = np.stack([words & 15, words >> 4], axis=2)
    else:
        codes = tensor.codes.view(np.int8)
    return layout.multiply * codes.reshape(rows, width).astype(np.int32) + layout.add


def scales_and_offsets(tensor: Recoded) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """float32 scale and offset of every scale group, [rows, width / group] each, as kernels compute them. Not for half."""
    layout, width = tensor.layout, tensor.width
    halves = tensor.scales.view(np.float16).astype(np.float32).reshape(tensor.rows, -1, 2 if layout.affine else 1)
    count = width // layout.group
    halves = np.repeat(halves, count // halves.shape[1], axis=1)
    if layout is PACKED3:
        packed = tensor.steps[:, width // GROUP :]
        steps = 1 + 2 * np.stack([packed & 15, packed >> 4], axis=2).reshape(tensor.rows, count, 1).astype(np.float32)
    elif layout.stepped:
        steps = tensor.steps.view(np.int8).reshape(tensor.rows, count, -1).astype(np.float32)
    else:
        steps = np.ones(halves.shape, np.float32)
    with np.errstate(invalid="ignore"):
        values = halves * np.float32(tensor.unit) * steps
    sign = np.float32(-1 if layout.stepped else 1)
    offsets = sign * values[:, :, 1] if layout.affine else np.zeros((tensor.rows, count), np.float32)
    return values[:, :, 0], offsets


def expand(tensor: Recoded) -> NDArray[np.float32]:
    """The weights: float32 [rows, columns]. The slow twin of every kernel that reads a layout."""
    if tensor.layout is HALF:
        return tensor.codes.view(np.float16).astype(np.float32)[:, : tensor.columns]
    scales, offsets = scales_and_offsets(tensor)
    weights = integers(tensor).astype(np.float32).reshape(*scales.shape, tensor.layout.group)
    with np.errstate(invalid="ignore"):
        weights *= scales[:, :, np.newaxis]
        if tensor.layout.affine:
            weights += offsets[:, :, np.newaxis]
    return weights.reshape(tensor.rows, -1)[:, : tensor.columns]
