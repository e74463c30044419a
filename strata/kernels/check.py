"""What every launcher checks before a launch, because CUDA checks nothing: a wrong dtype or shape is read as other data.

``Shapes`` binds names to extents on first use and compares from then on, so that one call states how the arguments of a
kernel belong together: ``Shapes("rms_norm").match("x", x, np.float32, "rows", "width")``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.devices.base import Buffer


class Shapes:
    """The named extents of one launch. Raises TypeError with the kernel's and the argument's name on any mismatch."""

    def __init__(self, kernel: str, **extents: int) -> None:
        self._kernel = kernel
        self._extents = dict(extents)

    def match(self, name: str, buffer: Buffer, dtype: type[np.generic], *extents: str | int) -> None:
        """``buffer`` must have this dtype and these extents: a number, or a name that means the same everywhere in the launch."""
        if buffer.dtype != np.dtype(dtype):
            raise TypeError(f"{self._kernel}: {name} must be {np.dtype(dtype)}, not {buffer.dtype}")
        wanted = [self._extents.setdefault(e, n) if isinstance(e, str) else e for e, n in zip(extents, buffer.shape)]
        if len(extents) != len(buffer.shape) or wanted != list(buffer.shape):
            raise TypeError(f"{self._kernel}: {name} must be {list(extents)} = {wanted}, not {list(buffer.shape)}")

    def __getitem__(self, name: str) -> int:
        return self._extents[name]

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            raise TypeError(f"{self._kernel}: {message}")


def ceil_div(count: int, step: int) -> int:
    """Steps needed to cover ``count``."""
    return -(-count // step)


def int32(value: int) -> Any:
    """A kernel's int parameter; Python's own int would be passed as 64 bits. Raises OverflowError where it does not fit."""
    if not -(2**31) <= value < 2**31:
        raise OverflowError(f"{value} does not fit a kernel's int")
    return np.int32(value)
