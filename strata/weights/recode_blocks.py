"""The integers inside each stored block: codes, scales and steps as the layouts want them (layouts.py).

Every function takes structured blocks [n] and returns ``Parts``: codes (one array, or two for packed3), the float16 scales and
the steps (none, one, or two for packed3), each with one line per block. Nothing here multiplies floats: scales are copied bit
for bit, so exactness is a matter of integers. The bit fields are described in plain.py, kquants.py and iquants.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.weights.grids import IQ4_VALUES, even_signs, gather, grids, signs
from strata.weights.iquants import nibbles, sign_codes
from strata.weights.kquants import q3_scales, scales_and_minima
from strata.weights.plain import fifth_bits

Blocks = NDArray[np.void]
Bytes = NDArray[np.uint8]
Lines = tuple[NDArray[Any], ...]
Parts = tuple[Lines, NDArray[Any], Lines]


def to_nibbles(codes: NDArray[Any]) -> Bytes:
    """Codes 0..15 [n, weights] -> bytes [n, weights / 2]: weight 8w + j low and 8w + 4 + j high in byte 4w + j."""
    words = codes.astype(np.uint8).reshape(len(codes), -1, 2, 4)
    packed = words[:, :, 0] | (words[:, :, 1] << 4)
    return packed.astype(np.uint8).reshape(len(codes), -1)


def halves(qs: Bytes) -> Bytes:
    """[n, 16] bytes -> 32 codes: the low nibbles, then the high ones."""
    return np.concatenate([qs & 15, qs >> 4], axis=1)


def pair(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """[n, k] and [n, k] (or [n] and [n]) -> [n, k, 2], element by element."""
    return np.stack([first, second], axis=-1)


# ------------------------------------------------------------ 3 and 4 bits


def iq3_s_index(blocks: Blocks) -> NDArray[np.uint16]:
    high = np.unpackbits(blocks["qh"], axis=1, bitorder="little")
    index: NDArray[np.uint16] = blocks["qs"] | (high.astype(np.uint16) << 8)
    return index


def iq3_s_nibbles(blocks: Blocks) -> Parts:
    values = gather(grids()["iq3_s"], iq3_s_index(blocks)) * gather(signs(), blocks["signs"])
    return (to_nibbles((values + 15) >> 1),), blocks["d"], ((1 + 2 * nibbles(blocks["scales"])).astype(np.uint8),)


def iq3_s_packed(blocks: Blocks) -> Parts:
    return (blocks["qs"], blocks["signs"]), blocks["d"], (blocks["qh"], blocks["scales"])


def q4_0(blocks: Blocks) -> Parts:
    return (to_nibbles(halves(blocks["qs"])),), blocks["d"], ()


def q2_0(blocks: Blocks) -> Parts:
    """d * (q - 1) = d * ((q + 7) - 8), and the scale of 64 weights twice."""
    codes = np.stack([(blocks["qs"] >> (2 * place)) & 3 for place in range(4)], axis=2).reshape(len(blocks), -1)
    return (to_nibbles(codes + 7),), pair(blocks["d"], blocks["d"]), ()


def q4_1(blocks: Blocks) -> Parts:
    return (to_nibbles(halves(blocks["qs"])),), pair(blocks["d"], blocks["m"]), ()


def q4_k(blocks: Blocks) -> Parts:
    qs = blocks["qs"].reshape(-1, 4, 32)
    codes = np.stack([qs & 15, qs >> 4], axis=2).reshape(len(blocks), -1)
    return (to_nibbles(codes),), pair(blocks["d"], blocks["dmin"]), (pair(*scales_and_minima(blocks["scales"])),)


# ------------------------------------------------------------ 8 bits


def q8_0(blocks: Blocks) -> Parts:
    return (blocks["qs"],), blocks["d"], ()


def five_bit_codes(blocks: Blocks) -> Bytes:
    codes: Bytes = halves(blocks["qs"]) | fifth_bits(blocks["qh"])
    return codes


def q5_0(blocks: Blocks) -> Parts:
    return (five_bit_codes(blocks).astype(np.int8) - np.int8(16),), blocks["d"], ()


def q5_1(blocks: Blocks) -> Parts:
    return (five_bit_codes(blocks),), pair(blocks["d"], blocks["m"]), ()


def iq4_nl(blocks: Blocks) -> Parts:
    return (IQ4_VALUES.take(halves(blocks["qs"])),), blocks["d"], ()


def q6_k(blocks: Blocks) -> Parts:
    ql = blocks["ql"].reshape(-1, 2, 2, 32)
    qh = blocks["qh"].reshape(-1, 2, 32)
    fields = [(ql[:, :, f % 2] >> (4 * (f // 2)) & 15) | ((qh >> (2 * f) & 3) << 4) for f in range(4)]
    codes = np.stack(fields, axis=2).reshape(len(blocks), -1).astype(np.int8) - np.int8(32)
    return (codes,), blocks["d"], (blocks["scales"],)


def q3_k(blocks: Blocks) -> Parts:
    qs = blocks["qs"].reshape(-1, 2, 32)
    codes = np.empty((len(blocks), 2, 4, 32), np.int8)
    for half in range(2):
        for field in range(4):
            third = (blocks["hmask"] >> (4 * half + field)) & 1
            codes[:, half, field] = ((qs[:, half] >> (2 * field)) & 3 | (third << 2)).astype(np.int8) - np.int8(4)
    return (codes.reshape(len(blocks), -1),), blocks["d"], (q3_scales(blocks["scales"]).astype(np.int8),)


def iq4_xs(blocks: Blocks) -> Parts:
    qs = blocks["qs"].reshape(-1, 8, 16)
    codes = IQ4_VALUES.take(np.stack([qs & 15, qs >> 4], axis=2).reshape(len(blocks), -1))
    high = np.stack([(blocks["scales_h"] >> (2 * group)) & 3 for group in range(8)], axis=1)
    steps = (nibbles(blocks["scales_l"]) | (high << 4)).astype(np.int8) - np.int8(32)
    return (codes,), blocks["d"], (np.repeat(steps, 2, axis=1),)


def iq3_xxs(blocks: Blocks) -> Parts:
    words = blocks["signs"]
    codes = gather(grids()["iq3_xxs"], blocks["qs"]) * gather(even_signs(), sign_codes(words))
    return (codes,), blocks["d"], (np.repeat(odd_steps(words >> 28), 2, axis=1),)


def iq2_xxs(blocks: Blocks) -> Parts:
    words = blocks["groups"]["signs"]
    codes = gather(grids()["iq2_xxs"], blocks["groups"]["qs"].reshape(-1, 32)) * gather(even_signs(), sign_codes(words))
    return (codes,), blocks["d"], (np.repeat(odd_steps(words >> 28), 2, axis=1),)


def iq2_xs(blocks: Blocks) -> Parts:
    qs = blocks["qs"]
    codes = gather(grids()["iq2_xs"], qs & 511) * gather(even_signs(), qs >> 9)
    return (codes,), blocks["d"], (odd_steps(nibbles(blocks["scales"])),)


def iq2_s(blocks: Blocks) -> Parts:
    high = np.stack([(blocks["qh"] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, 32)
    codes = gather(grids()["iq2_s"], blocks["qs"] | (high.astype(np.uint16) << 8)) * gather(signs(), blocks["signs"])
    return (codes,), blocks["d"], (odd_steps(nibbles(blocks["scales"])),)


def odd_steps(s: NDArray[Any]) -> NDArray[np.int8]:
    """1/2 + s as the integer 1 + 2s; the layout's unit takes the factor back."""
    return (1 + 2 * s).astype(np.int8)


def q5_k(blocks: Blocks) -> Parts:
    qs = blocks["qs"].reshape(-1, 4, 32)
    low = np.stack([qs & 15, qs >> 4], axis=2).reshape(-1, 8, 32)
    high = np.stack([(blocks["qh"] >> group) & 1 for group in range(8)], axis=1)
    codes = (low | (high << 4)).reshape(len(blocks), -1)
    steps = np.repeat(pair(*scales_and_minima(blocks["scales"])), 2, axis=1)
    return (codes,), pair(blocks["d"], blocks["dmin"]), (steps,)


def q2_k(blocks: Blocks) -> Parts:
    qs = blocks["qs"].reshape(-1, 2, 32)
    codes = np.stack([(qs >> (2 * field)) & 3 for field in range(4)], axis=2).reshape(len(blocks), -1)
    return (codes,), pair(blocks["d"], blocks["dmin"]), (pair(blocks["scales"] & 15, blocks["scales"] >> 4),)
