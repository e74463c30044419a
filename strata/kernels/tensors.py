"""What kernels take besides plain buffers: a weight matrix in its layout, and activations as int8 with scales.

The layouts are described in strata/weights/layouts.py, the activations in cuda_src/include/activations.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.devices.base import Buffer, Device, Stream
from strata.kernels.check import Shapes, int32
from strata.weights.grids import grids
from strata.weights.layouts import LAYOUTS, Recoded, padded


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights [rows, columns] on a device. ``codes`` uint8, ``scales`` uint16, ``steps`` uint8: planes of ``layout``, [rows, n] each.

    ``grid``: packed3's table, uint32 [512]. ``bias``: float32 [rows] or None. ``width``: columns rounded up to 64.
    """

    layout: str
    rows: int
    columns: int
    codes: Buffer
    scales: Buffer
    steps: Buffer
    grid: Buffer
    unit: float = 1.0
    bias: Buffer | None = None

    @property
    def width(self) -> int:
        return padded(self.columns)

    def arguments(self) -> list[Buffer | np.float32 | np.int32]:
        """The parameters with which every kernel over weights begins."""
        return [self.codes, self.scales, self.steps, self.grid, np.float32(self.unit), int32(self.rows), int32(self.width)]

    def bias_arguments(self) -> list[Buffer | np.int32]:
        """A pointer that is only followed where the flag is 1."""
        if self.bias is None:
            return [self.scales.view((0,), np.float32), np.int32(0)]
        return [self.bias, np.int32(1)]

    def check(self, kernel: str) -> None:
        """Raises TypeError unless the planes are what the layout says."""
        shapes = Shapes(kernel)
        planes = LAYOUTS[self.layout].plane_shapes(self.rows, self.width)
        shapes.match("codes", self.codes, np.uint8, *planes[0])
        shapes.match("scales", self.scales, np.uint16, *planes[1])
        shapes.match("steps", self.steps, np.uint8, *planes[2])
        if self.bias is not None:
            shapes.match("bias", self.bias, np.float32, self.rows)


@dataclass(frozen=True, slots=True)
class Activations:
    """Rows [count, columns] as int8. ``codes`` int8 [count, width], ``meta`` uint32 [count, width / 32, 2]."""

    columns: int
    codes: Buffer
    meta: Buffer

    @property
    def count(self) -> int:
        return self.codes.shape[0]

    @property
    def width(self) -> int:
        return self.codes.shape[1]

    def check(self, kernel: str) -> None:
        shapes = Shapes(kernel, width=padded(self.columns), groups=padded(self.columns) // 32)
        shapes.match("codes", self.codes, np.int8, "count", "width")
        shapes.match("meta", self.meta, np.uint32, "count", "groups", 2)

    def rows(self, start: int, stop: int) -> Activations:
        """Rows ``start .. stop - 1``."""
        return Activations(self.columns, self.codes.rows(start, stop), self.meta.rows(start, stop))


def allocate_activations(device: Device, count: int, columns: int) -> Activations:
    """Room for ``count`` rows."""
    width = padded(columns)
    return Activations(columns, device.allocate((count, width), np.int8), device.allocate((count, width // 32, 2), np.uint32))


def put_grid(device: Device, stream: Stream) -> Buffer:
    """packed3's table of magnitudes, once per device: uint32 [512]."""
    table = np.ascontiguousarray(grids()["iq3_s"]).view(np.uint32).reshape(-1)
    buffer = device.allocate(table.shape, np.uint32)
    device.upload(buffer, table, stream)
    stream.synchronize()
    return buffer


def put_matrix(device: Device, tensor: Recoded, grid: Buffer, stream: Stream, bias: np.ndarray | None = None) -> Matrix:
    """A recoded tensor on the device; returns when it is there. ``bias`` float32 [rows]."""
    planes = []
    for plane in (tensor.codes, tensor.scales, tensor.steps) + (() if bias is None else (bias,)):
        buffer = device.allocate(plane.shape, plane.dtype)
        device.upload(buffer, np.ascontiguousarray(plane), stream)
        planes.append(buffer)
    stream.synchronize()
    codes, scales, steps = planes[:3]
    return Matrix(tensor.layout.name, tensor.rows, tensor.columns, codes, scales, steps, grid, tensor.unit, *planes[3:])
