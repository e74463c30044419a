"""Matrices of random bytes in the shape of IQ3_S, for models whose weights do not matter: made in no time, read as fast as real ones."""

from __future__ import annotations

import numpy as np

from strata.weights.formats import BY_NAME
from strata.weights.writer import StoredTensor

PIECE = 1 << 20  # bytes of random blocks, repeated


def random_blocks(rows: int, columns: int) -> StoredTensor:
    """IQ3_S: all bits random but the scales; a weight's root mean square is about 1 / sqrt(columns)."""
    format = BY_NAME["IQ3_S"]
    count = rows * columns // format.block
    rng = np.random.default_rng(rows + columns)
    piece = rng.integers(0, 256, format.bytes * min(count, PIECE // format.bytes), dtype=np.uint8).view(format.dtype)
    piece["d"] = rng.uniform(0.8, 1.2, len(piece)) / (150.0 * columns**0.5)  # 150: of the integers (1 + 2s)(2q - 15)
    return StoredTensor(format, (rows, columns), np.resize(piece.view(np.uint8), count * format.bytes))
