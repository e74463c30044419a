"""Floats, and blocks of 32 or 64 weights with one scale: F32 F16 BF16, Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_0.

A block is ``d * (q - offset)`` or ``d * q + m`` with small integers q; d and m are float16. In Q4_* and Q5_* byte j of ``qs``
holds the low four bits of weight j (low nibble) and of weight j + 16 (high nibble); bit j of ``qh`` is the fifth bit of
weight j. In Q2_0 byte j holds weights 4j .. 4j + 3, lowest bits first.

Every decoder here and in kquants.py and iquants.py takes structured blocks [n] and fills ``out`` float32 [n, weights], in the
order of float32 operations that the ggml reference uses, so that the result is the reference's bit for bit. They write
straight into ``out`` and keep temporaries of one byte per weight: formats.py calls them on pieces that fit a cache.

Layouts: ggml-common.h of llama.cpp. There is a fork's format of the same name and id as Q2_0 with 128 weights in 34 bytes; such a
file cannot be told by its types, but it is refused when opened: sized by this layout, its tensors (of more than a few
thousand weights) overlap or leave the file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.void]
Floats = NDArray[np.float32]

F32 = np.dtype([("x", "<f4")])
F16 = np.dtype([("x", "<f2")])
BF16 = np.dtype([("x", "<u2")])
Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
Q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])
Q2_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])


def float_column(values: NDArray[Any]) -> Floats:
    """Per-block values [n] as float32 [n, 1], to be multiplied with rows of weights."""
    return values.astype(np.float32)[:, np.newaxis]


def fifth_bits(qh: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bit j of each row [n, 4], as 0 or 16 in column j of [n, 32]."""
    bits = np.unpackbits(qh, axis=1, bitorder="little")
    bits <<= 4
    return bits


def five_bits(blocks: Blocks, out: Floats) -> None:
    """q in 0..31 of Q5_0 and Q5_1 into ``out`` [n, 32]."""
    high = fifth_bits(blocks["qh"])
    out[:, :16] = high[:, :16] | (blocks["qs"] & 15)
    out[:, 16:] = high[:, 16:] | (blocks["qs"] >> 4)


def decode_f32(blocks: Blocks, out: Floats) -> None:
    out[:, 0] = blocks["x"]


def decode_f16(blocks: Blocks, out: Floats) -> None:
    out[:, 0] = blocks["x"]


def decode_bf16(blocks: Blocks, out: Floats) -> None:
    """bfloat16 is the upper half of a float32."""
    out.view(np.uint32)[:, 0] = blocks["x"].astype(np.uint32) << 16


def decode_q4_0(blocks: Blocks, out: Floats) -> None:
    out[:, :16] = blocks["qs"] & 15
    out[:, 16:] = blocks["qs"] >> 4
    out -= 8
    out *= float_column(blocks["d"])


def decode_q4_1(blocks: Blocks, out: Floats) -> None:
    out[:, :16] = blocks["qs"] & 15
    out[:, 16:] = blocks["qs"] >> 4
    out *= float_column(blocks["d"])
    out += float_column(blocks["m"])


def decode_q5_0(blocks: Blocks, out: Floats) -> None:
    five_bits(blocks, out)
    out -= 16
    out *= float_column(blocks["d"])


def decode_q5_1(blocks: Blocks, out: Floats) -> None:
    five_bits(blocks, out)
    out *= float_column(blocks["d"])
    out += float_column(blocks["m"])


def decode_q8_0(blocks: Blocks, out: Floats) -> None:
    out[...] = blocks["qs"]
    out *= float_column(blocks["d"])


def decode_q2_0(blocks: Blocks, out: Floats) -> None:
    """d * (q - 1), q in 0..3."""
    for place in range(4):
        out[:, place::4] = (blocks["qs"] >> (2 * place)) & 3
    out -= 1
    out *= float_column(blocks["d"])
