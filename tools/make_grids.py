"""Write strata/weights/grids.npz, the codebooks of the IQ formats, from the ``gguf`` package (a test dependency).

The tables are facts of the GGUF format. The file is written the same byte for byte each time with one NumPy version; tests compare
the arrays.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants

NAMES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
TARGET = Path(__file__).parent.parent / "strata" / "weights" / "grids.npz"


def make_grids() -> dict[str, Any]:
    """Each codebook as uint8 [entries, 4 or 8], by the lower-case name of its format."""
    found = {}
    for name in NAMES:
        cls = getattr(quants, name)
        cls.init_grid()
        grid = cls.grid[0, 0]
        found[name.lower()] = grid.astype(np.uint8)
        assert np.array_equal(found[name.lower()], grid) and grid.max() < 128, name
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=TARGET)
    path = parser.parse_args().file
    np.savez_compressed(path, **make_grids())
    print(f"{path}: {path.stat().st_size} bytes")
