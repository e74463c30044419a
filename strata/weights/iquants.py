"""The IQ formats: magnitudes from a codebook (grids.py), signs beside them, a small integer scale times one float16.

======= ============================= ======================== =================================================
type    value                         index                    signs
======= ============================= ======================== =================================================
IQ2_XXS d*(1/2 + s)/4*grid, per 32    8 bits                   7 bits for 8 weights; s on top of the four of them
IQ2_XS  d*(1/2 + s)/4*grid, per 16    9 bits of a uint16       its upper 7 bits
IQ2_S   d*(1/2 + s)/4*grid, per 16    8 bits, 2 in ``qh``      8 bits for 8 weights
IQ3_XXS d*(1/2 + s)/2*grid, per 32    8 bits for 4 weights     as IQ2_XXS
IQ3_S   d*(1 + 2s)*grid,    per 32    8 bits, 1 in ``qh``      8 bits for 8 weights
IQ4_NL  d*value, 32 weights           4 bits                   in the value
IQ4_XS  d*(s - 32)*value,   per 32    4 bits                   in the value
======= ============================= ======================== =================================================

See plain.py for what a decoder is. Layouts: ggml-common.h of llama.cpp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata.weights.grids import IQ4_VALUES, even_signs, gather, grids, signs
from strata.weights.plain import Blocks, Floats, float_column

IQ2_XXS = np.dtype([("d", "<f2"), ("groups", [("qs", "u1", 4), ("signs", "<u4")], 8)])
IQ2_XS = np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)])
IQ2_S = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)])
IQ3_XXS = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("signs", "<u4", 8)])
IQ3_S = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)])
IQ4_NL = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
IQ4_XS = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)])

HALF = np.float32(0.5)
QUARTER = np.float32(0.25)


def nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[n, k] bytes -> [n, 2k]: low nibble, high nibble, byte by byte."""
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)


def sign_codes(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Four 7-bit sign codes of each word: [n, 8] -> [n, 32]."""
    return np.stack([(words >> shift) & 127 for shift in (0, 7, 14, 21)], axis=2).reshape(len(words), -1)


def scaled(magnitudes: NDArray[np.int8], signs_of: NDArray[np.int8], scales: Floats, out: Floats) -> None:
    """``out`` [n, 256] = magnitude * sign, times ``scales`` [n, k] for k equal runs of weights."""
    np.copyto(out, magnitudes * signs_of)
    runs = out.reshape(*scales.shape, -1)
    runs *= scales[:, :, np.newaxis]


def decode_iq2_xxs(blocks: Blocks, out: Floats) -> None:
    words = blocks["groups"]["signs"]
    index = blocks["groups"]["qs"].reshape(-1, 32)
    scales = float_column(blocks["d"]) * (HALF + (words >> 28).astype(np.float32)) * QUARTER
    scaled(gather(grids()["iq2_xxs"], index), gather(even_signs(), sign_codes(words)), scales, out)


def decode_iq2_xs(blocks: Blocks, out: Floats) -> None:
    qs = blocks["qs"]
    scales = float_column(blocks["d"]) * (HALF + nibbles(blocks["scales"])) * QUARTER
    scaled(gather(grids()["iq2_xs"], qs & 511), gather(even_signs(), qs >> 9), scales, out)


def decode_iq2_s(blocks: Blocks, out: Floats) -> None:
    high = np.stack([(blocks["qh"] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, 32)
    index = blocks["qs"] | (high.astype(np.uint16) << 8)
    scales = float_column(blocks["d"]) * (HALF + nibbles(blocks["scales"])) * QUARTER
    scaled(gather(grids()["iq2_s"], index), gather(signs(), blocks["signs"]), scales, out)


def decode_iq3_xxs(blocks: Blocks, out: Floats) -> None:
    words = blocks["signs"]
    scales = float_column(blocks["d"]) * (HALF + (words >> 28).astype(np.float32)) * HALF
    scaled(gather(grids()["iq3_xxs"], blocks["qs"]), gather(even_signs(), sign_codes(words)), scales, out)


def decode_iq3_s(blocks: Blocks, out: Floats) -> None:
    high = np.unpackbits(blocks["qh"], axis=1, bitorder="little")
    index = blocks["qs"] | (high.astype(np.uint16) << 8)
    scales = float_column(blocks["d"]) * (1 + 2 * nibbles(blocks["scales"]))
    scaled(gather(grids()["iq3_s"], index), gather(signs(), blocks["signs"]), scales, out)


def decode_iq4_nl(blocks: Blocks, out: Floats) -> None:
    out[:, :16] = IQ4_VALUES.take(blocks["qs"] & 15)
    out[:, 16:] = IQ4_VALUES.take(blocks["qs"] >> 4)
    out *= float_column(blocks["d"])


def decode_iq4_xs(blocks: Blocks, out: Floats) -> None:
    runs = out.reshape(-1, 8, 2, 16)
    qs = blocks["qs"].reshape(-1, 8, 16)
    runs[:, :, 0] = IQ4_VALUES.take(qs & 15)
    runs[:, :, 1] = IQ4_VALUES.take(qs >> 4)
    high = np.stack([(blocks["scales_h"] >> (2 * group)) & 3 for group in range(8)], axis=1)
    scales = (nibbles(blocks["scales_l"]) | (high << 4)).astype(np.float32) - np.float32(32)
    groups = out.reshape(-1, 8, 32)
    groups *= (float_column(blocks["d"]) * scales)[:, :, np.newaxis]
