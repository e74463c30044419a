"""From a stored tensor to a device layout (layouts.py), without loss: expanding the result gives the GGUF decoder's floats.

Each stored format has its own layout; IQ3_S has two, packed as stored (least memory) or as nibbles (least instructions: its
magnitudes are odd, 1 to 15, so with the sign they are 2q - 15). Which one is the caller's choice, by memory and device.
Both give the same integers, scales and order of sums, so the choice changes no bit of a result.

Floats other than F16 are rounded to float16 (values beyond 65504 become infinite): they are rare among matrices of quantised
files, and a file kept in BF16 for its range belongs on another path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.weights import recode_blocks as blocks_of
from strata.weights.formats import Format, dequantize_blocks
from strata.weights.layouts import (
    AFFINE4, AFFINE8, AFFINE_SUPER8, FLAT4, FLAT8, GROUP, HALF, ODD4, PACKED3, SUPER4, SUPER8, Layout, Recoded, padded,
)  # fmt: skip

PIECE_BYTES = 1 << 20


class _Way(NamedTuple):
    """How one stored format becomes one layout. ``take``: structured blocks -> (codes, scales, steps), one line per block."""

    layout: Layout
    take: Callable[[NDArray[np.void]], blocks_of.Parts]
    unit: float = 1.0


WAYS: dict[str, tuple[_Way, ...]] = {
    "IQ3_S": (_Way(ODD4, blocks_of.iq3_s_nibbles), _Way(PACKED3, blocks_of.iq3_s_packed)),
    "Q4_0": (_Way(FLAT4, blocks_of.q4_0),),
    "Q2_0": (_Way(FLAT4, blocks_of.q2_0),),
    "Q4_1": (_Way(AFFINE4, blocks_of.q4_1),),
    "Q4_K": (_Way(SUPER4, blocks_of.q4_k),),
    "Q8_0": (_Way(FLAT8, blocks_of.q8_0),),
    "Q5_0": (_Way(FLAT8, blocks_of.q5_0),),
    "IQ4_NL": (_Way(FLAT8, blocks_of.iq4_nl),),
    "Q5_1": (_Way(AFFINE8, blocks_of.q5_1),),
    "Q6_K": (_Way(SUPER8, blocks_of.q6_k),),
    "Q3_K": (_Way(SUPER8, blocks_of.q3_k),),
    "IQ4_XS": (_Way(SUPER8, blocks_of.iq4_xs),),
    "IQ3_XXS": (_Way(SUPER8, blocks_of.iq3_xxs, 0.25),),
    "IQ2_XXS": (_Way(SUPER8, blocks_of.iq2_xxs, 0.125),),
    "IQ2_XS": (_Way(SUPER8, blocks_of.iq2_xs, 0.125),),
    "IQ2_S": (_Way(SUPER8, blocks_of.iq2_s, 0.125),),
    "Q5_K": (_Way(AFFINE_SUPER8, blocks_of.q5_k),),
    "Q2_K": (_Way(AFFINE_SUPER8, blocks_of.q2_k),),
}


def layouts_for(format: Format) -> tuple[Layout, ...]:
    """The layouts that hold this format, the one with the fewest instructions first."""
    ways = WAYS.get(format.name)
    return tuple(way.layout for way in ways) if ways else (HALF,)


def recode(format: Format, data: NDArray[np.uint8], rows: int, columns: int, layout: Layout | None = None) -> Recoded:
    """A tensor [rows, columns] stored as ``data`` (its bytes, in order) in ``layout`` (default: the first of layouts_for).

    Goes piece by piece, so that it needs little memory beyond its result. Raises ValueError for bytes that are not that tensor,
    or a layout that does not hold the format.
    """
    layout = layout or layouts_for(format)[0]
    if layout not in layouts_for(format):
        raise ValueError(f"{format.name} does not fit the layout {layout.name}")
    if columns % format.block or data.size != format.size(rows * columns):
        raise ValueError(f"{data.size} bytes are not {rows} rows of {columns} weights of {format.name}")
    codes, scales, steps = layout.plane_shapes(rows, padded(columns))
    tensor = Recoded(layout, columns, np.zeros(codes, np.uint8), np.zeros(scales, np.uint16), np.zeros(steps, np.uint8))
    row_bytes = format.size(columns)
    step = max(1, PIECE_BYTES // max(row_bytes, 1))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        piece = data[start * row_bytes : stop * row_bytes]
        part = replace(tensor, codes=tensor.codes[start:stop], scales=tensor.scales[start:stop], steps=tensor.steps[start:stop])
        if layout is HALF:
            _round_to_half(format, piece, part)
        else:
            _fill(next(way for way in WAYS[format.name] if way.layout is layout), format, piece, part)
    return replace(tensor, unit=next((way.unit for way in WAYS.get(format.name, ()) if way.layout is layout), 1.0))


def _round_to_half(format: Format, piece: NDArray[np.uint8], part: Recoded) -> None:
    with np.errstate(over="ignore"):
        part.codes.view(np.float16)[:, : part.columns] = dequantize_blocks(format, piece).reshape(part.rows, -1)


def _fill(way: _Way, format: Format, piece: NDArray[np.uint8], part: Recoded) -> None:
    """Puts the lines of blocks beside each other into the rows of the planes; padding stays zero."""
    codes, scales, steps = way.take(np.ascontiguousarray(piece).reshape(-1).view(format.dtype))
    if way.layout is PACKED3:
        groups = part.width // GROUP
        for plane, edge, pieces in ((part.codes, 8 * groups, codes), (part.steps, groups, steps)):
            plane[:, :edge] = pieces[0].reshape(part.rows, -1)
            plane[:, edge:] = pieces[1].reshape(part.rows, -1)
    else:
        _put(part.codes, codes[0])
        if way.layout.stepped:
            _put(part.steps, steps[0])
    _put(part.scales, scales)


def _put(plane: NDArray[np.uint8] | NDArray[np.uint16], lines: NDArray[np.generic]) -> None:
    flat = np.ascontiguousarray(lines).view(plane.dtype).reshape(len(plane), -1)
    plane[:, : flat.shape[1]] = flat


def join(tensors: list[Recoded]) -> Recoded:
    """Tensors of one layout below each other (their rows in order). Raises ValueError where they differ in more than their rows."""
    first = tensors[0]
    if any((x.layout, x.columns, x.unit) != (first.layout, first.columns, first.unit) for x in tensors):
        raise ValueError("only tensors of one layout, unit and row length can be joined")
    return replace(
        first,
        codes=np.concatenate([x.codes for x in tensors]),
        scales=np.concatenate([x.scales for x in tensors]),
        steps=np.concatenate([x.steps for x in tensors]),
    )


def interleave(first: Recoded, second: Recoded) -> Recoded:
    """Row 2i is row i of ``first``, row 2i + 1 of ``second``: gate and up, so that one block of a kernel has both."""
    joined = join([first, second])
    order = np.arange(2 * first.rows).reshape(2, -1).T.reshape(-1)
    return replace(joined, codes=joined.codes[order], scales=joined.scales[order], steps=joined.steps[order])
