"""The codebooks of the IQ formats: which magnitudes a stored index stands for, and which signs.

The magnitudes are part of the file format and follow no formula: they were chosen once, by the authors of ggml, from where
quantised weights fall. grids.npz holds them as uint8 arrays [entries, values]; tools/make_grids.py makes it from the ``gguf`` package,
and a test compares the two. Lookups are gathers of whole entries: an entry of 4 or 8 bytes is one integer here.

Signs are a byte per eight values, bit i set for a negative value i. Where a format stores seven bits, the eighth makes the
number of negative values even.
"""

from __future__ import annotations

import functools
from importlib import resources

import numpy as np
from numpy.typing import NDArray

# IQ4_NL and IQ4_XS: the value of each 4-bit code.
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)


@functools.cache
def grids() -> dict[str, NDArray[np.uint8]]:
    """iq2_xxs [256, 8], iq2_xs [512, 8], iq2_s [1024, 8], iq3_xxs [256, 4], iq3_s [512, 4]: uint8 magnitudes below 128."""
    data = resources.files("strata.weights").joinpath("grids.npz")
    with data.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def gather(entries: NDArray[np.uint8] | NDArray[np.int8], index: NDArray[np.integer]) -> NDArray[np.int8]:
    """Entries [k, 4 or 8] at index [n, m], as int8 [n, m * 4 or 8]."""
    width = entries.shape[1]
    whole = entries.view(np.uint32 if width == 4 else np.uint64)[:, 0]
    return whole.take(index).view(np.int8)


@functools.cache
def signs() -> NDArray[np.int8]:
    """+1 or -1 for each of the eight values under a byte of signs: int8 [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little")
    return 1 - 2 * bits.astype(np.int8)


@functools.cache
def even_signs() -> NDArray[np.int8]:
    """The same for seven stored bits and a computed eighth: int8 [128, 8]."""
    codes = np.arange(128, dtype=np.uint8)[:, np.newaxis]
    odd = np.unpackbits(codes, axis=1).sum(axis=1, dtype=np.uint8) & 1
    table: NDArray[np.int8] = signs()[codes[:, 0] | (odd << 7)]
    return table
