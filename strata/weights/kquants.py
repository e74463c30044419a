"""The K-quants: superblocks of 256 weights, scaled in groups of 16 or 32 by small integers times one float16.

==== ====== ========================= ==============================================================
type bits   value                     integers
==== ====== ========================= ==============================================================
Q2_K 2      d*s*q - dmin*m  per 16    s, m 4 bits: low and high nibble of ``scales``
Q3_K 3      d*s*(q - 4)     per 16    s 6 bits less 32; the third bit of q in ``hmask``
Q4_K 4      d*s*q - dmin*m  per 32    s, m 6 bits, packed in 12 bytes
Q5_K 5      as Q4_K                   the fifth bit of q in ``qh``
Q6_K 6      d*s*(q - 32)    per 16    s int8; the two upper bits of q in ``qh``
==== ====== ========================= ==============================================================

Low bits interleave by shift: of a run of bytes, the lowest field of every byte comes first, then the next field of every
byte. A run has 32 bytes, but 64 in Q6_K's ``ql``. See plain.py for what a decoder is. Layouts: ggml-common.h of llama.cpp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata.weights.plain import Blocks, Floats, float_column

Q2_K = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
Q3_K = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])

Bytes = NDArray[np.uint8]


def scales_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The eight scales and eight minima, six bits each, of [n, 12] bytes: two [n, 8].

    Bytes 0..3 hold scales 0..3 in their low six bits, bytes 4..7 the minima 0..3; bytes 8..11 the low nibbles of scales
    4..7 (low) and of minima 4..7 (high), whose upper two bits are the upper two bits of bytes 0..3 and 4..7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    return scales, minima


def q3_scales(packed: Bytes) -> Floats:
    """The sixteen scales -32..31 of Q3_K's [n, 12] bytes: low nibbles in bytes 0..7, upper two bits in bytes 8..11."""
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = np.concatenate([(packed[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales: Floats = (low | (high << 4)).astype(np.float32) - np.float32(32)
    return scales


def decode_q2_k(blocks: Blocks, out: Floats) -> None:
    runs = out.reshape(-1, 2, 4, 32)
    qs = blocks["qs"].reshape(-1, 2, 32)
    for field in range(4):
        runs[:, :, field] = (qs >> (2 * field)) & 3
    groups = out.reshape(-1, 16, 16)
    groups *= (float_column(blocks["d"]) * (blocks["scales"] & 15))[:, :, np.newaxis]
    groups -= (float_column(blocks["dmin"]) * (blocks["scales"] >> 4))[:, :, np.newaxis]


def decode_q3_k(blocks: Blocks, out: Floats) -> None:
    runs = out.reshape(-1, 2, 4, 32)
    qs = blocks["qs"].reshape(-1, 2, 32)
    for half in range(2):
        for field in range(4):
            third = (blocks["hmask"] >> (4 * half + field)) & 1
            runs[:, half, field] = ((qs[:, half] >> (2 * field)) & 3) | (third << 2)
    out -= 4
    groups = out.reshape(-1, 16, 16)
    groups *= (float_column(blocks["d"]) * q3_scales(blocks["scales"]))[:, :, np.newaxis]


def scale_by_32(blocks: Blocks, out: Floats) -> None:
    """q -> d*s*q - dmin*m, in place: the last step of Q4_K and Q5_K."""
    scales, minima = scales_and_minima(blocks["scales"])
    groups = out.reshape(-1, 8, 32)
    groups *= (float_column(blocks["d"]) * scales)[:, :, np.newaxis]
    groups -= (float_column(blocks["dmin"]) * minima)[:, :, np.newaxis]


def decode_q4_k(blocks: Blocks, out: Floats) -> None:
    runs = out.reshape(-1, 4, 2, 32)
    qs = blocks["qs"].reshape(-1, 4, 32)
    runs[:, :, 0] = qs & 15
    runs[:, :, 1] = qs >> 4
    scale_by_32(blocks, out)


def decode_q5_k(blocks: Blocks, out: Floats) -> None:
    runs = out.reshape(-1, 8, 32)
    qs = blocks["qs"].reshape(-1, 4, 32)
    for group in range(8):
        low = (qs[:, group // 2] >> (4 * (group % 2))) & 15
        runs[:, group] = low | (((blocks["qh"] >> group) & 1) << 4)
    scale_by_32(blocks, out)


def decode_q6_k(blocks: Blocks, out: Floats) -> None:
    runs = out.reshape(-1, 2, 4, 32)
    ql = blocks["ql"].reshape(-1, 2, 2, 32)
    qh = blocks["qh"].reshape(-1, 2, 32)
    for field in range(4):
        low = (ql[:, :, field % 2] >> (4 * (field // 2))) & 15
        runs[:, :, field] = low | (((qh >> (2 * field)) & 3) << 4)
    out -= 32
    groups = out.reshape(-1, 16, 16)
    groups *= (float_column(blocks["d"]) * blocks["scales"])[:, :, np.newaxis]
