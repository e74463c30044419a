"""Products of rows with the experts they were routed to (experts.cu): visits one by one for few rows, grouped by expert for many.

The bits are the same either way, and those of matvec.py for the same row and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels.check import Shapes, ceil_div, int32
from strata.kernels.matvec import THREADS, TILE_ROWS, check_product
from strata.kernels.route import Groups, Visits, num_tiles, tiles_for
from strata.kernels.tensors import Activations, Matrix

MAX_COUNT = 8  # rows whose visits are computed one by one
SWIGLU_ROWS, DOWN_ROWS = 32, 8
FOLD = KernelName("experts", "fold_visits")


@dataclass(frozen=True, slots=True)
class Experts:
    """The same matrix of ``count`` experts, one below the other. No bias."""

    count: int
    matrix: Matrix

    @property
    def rows(self) -> int:
        """Of one expert."""
        return self.matrix.rows // self.count

    def arguments(self) -> list[Buffer | np.float32 | np.int32]:
        return [self.matrix.codes, self.matrix.scales, self.matrix.steps, np.float32(self.matrix.unit)]

    def check(self, kernel: str, x: Activations) -> None:
        check_product(kernel, self.matrix, x)
        Shapes(kernel).require(self.matrix.rows % self.count == 0 and self.matrix.bias is None, "experts of different sizes, or a bias")


def one_by_one(layouts: Sequence[str], count: int) -> bool:
    """Whether visits of ``count`` rows are computed one by one."""
    return count <= MAX_COUNT and "half" not in layouts


def lanes_for(width: int) -> int:
    """Lanes that make a product over ``width`` columns; what a warp has left makes others."""
    return next((lanes for lanes in (8, 16) if width <= 64 * lanes), 32)


def swiglu_name(gate: str, up: str, width: int) -> KernelName:
    return KernelName("experts", f"expert_swiglu<{gate}, {up}, {lanes_for(width)}>")


def down_name(layout: str, width: int) -> KernelName:
    return KernelName("experts", f"expert_down<{layout}, {lanes_for(width)}>")


def grouped_swiglu_name(gate: str, up: str, size: int) -> KernelName:
    return KernelName("experts", f"grouped_swiglu<{gate}, {up}, {size}>")


def grouped_down_name(layout: str, size: int) -> KernelName:
    return KernelName("experts", f"grouped_down<{layout}, {size}>")


def kernels_for(layouts: tuple[str, str, str], widths: tuple[int, int], experts: int, used: int, count: int) -> list[KernelName]:
    """The kernels of gate, up and down in ``layouts`` over ``widths`` (of gate and up, of down) for a window of ``count`` rows."""
    gate, up, down = layouts
    if one_by_one(layouts, count):
        return [swiglu_name(gate, up, widths[0]), down_name(down, widths[1])]
    size = tiles_for(count * used, experts)
    return [grouped_swiglu_name(gate, up, size), grouped_down_name(down, size), FOLD]


def expert_swiglu(
    device: Device, gate: Experts, up: Experts, x: Activations, visits: Visits, groups: Groups | None, out: Activations, stream: Stream
) -> None:
    """``out`` [visits, rows] = silu(gate) * up of each visit, quantised; its padding must be zero. ``x`` [rows, width].

    With ``groups`` (group_visits) on the matrix units, without visit by visit: up to MAX_COUNT rows, not for float16 weights.
    """
    shapes = Shapes("expert_swiglu", rows=x.count)
    visits.check(shapes)
    out.check("expert_swiglu")
    for experts in (gate, up):
        experts.check("expert_swiglu", x)
    fits = (gate.count, gate.rows) == (up.count, up.rows) and gate.rows == out.columns and out.columns % SWIGLU_ROWS == 0
    shapes.require(fits and out.count == visits.count, f"{gate.rows} gate and {up.rows} up rows, {out.count} x {out.columns} outputs")
    weights = [*gate.arguments(), *up.arguments(), gate.matrix.grid, int32(gate.rows), int32(x.width)]
    outputs = [out.codes, out.meta, int32(out.width)]
    layouts = gate.matrix.layout, up.matrix.layout
    blocks = gate.rows // SWIGLU_ROWS
    if groups is None:
        shapes.require(one_by_one(layouts, x.count), f"{x.count} rows of {layouts} one by one")
        launch = Launch(swiglu_name(*layouts, x.width), (blocks, visits.count, 1), THREADS)
        device.launch(launch, [*weights, x.codes, x.meta, visits.ids, int32(visits.used), *outputs], stream)
        return
    check_groups(shapes, groups, visits, gate.count)
    launch = Launch(grouped_swiglu_name(*layouts, groups.size), (blocks, groups.tiles.shape[0], 1), THREADS)
    device.launch(launch, [*weights, x.codes, x.meta, groups.order, groups.tiles, int32(visits.used), *outputs], stream)


def expert_down(
    device: Device, down: Experts, x: Activations, visits: Visits, groups: Groups | None, part: Buffer, shared: Buffer | None, y: Buffer,
    stream: Stream,
) -> None:  # fmt: skip
    """``y`` float32 [rows, columns] = the sum over each row's visits of weight * product, plus ``shared`` (same shape; may be ``y``).

    ``x`` [visits, width]. ``part`` float32 [any, columns] has room for every visit's product; touched with ``groups`` only.
    """
    shapes = Shapes("expert_down", columns=down.rows)
    visits.check(shapes)
    down.check("expert_down", x)
    shapes.match("y", y, np.float32, "rows", "columns")
    if shared is not None:
        shapes.match("shared", shared, np.float32, "rows", "columns")
    shapes.require(x.count == visits.count, f"{x.count} activations for {visits.count} visits")
    rows, layout = shapes["rows"], down.matrix.layout
    weights = [*down.arguments(), down.matrix.grid, int32(down.rows), int32(x.width), x.codes, x.meta]
    ends: list[Buffer | np.int32] = [y, np.int32(0), y] if shared is None else [shared, np.int32(1), y]
    if groups is None:
        shapes.require(one_by_one([layout], rows), f"{rows} rows of {layout} one by one")
        launch = Launch(down_name(layout, x.width), (ceil_div(down.rows, DOWN_ROWS), rows, 1), THREADS)
        device.launch(launch, [*weights, visits.ids, visits.weights, int32(visits.used), *ends], stream)
        return
    check_groups(shapes, groups, visits, down.count)
    shapes.match("part", part, np.float32, "room", "columns")
    shapes.require(shapes["room"] >= visits.count, f"{visits.count} visits in a space for {shapes['room']}")
    launch = Launch(grouped_down_name(layout, groups.size), (ceil_div(down.rows, TILE_ROWS), groups.tiles.shape[0], 1), THREADS)
    device.launch(launch, [*weights, groups.order, groups.tiles, part], stream)
    folded = [part, visits.weights, int32(visits.used), int32(down.rows), *ends]
    device.launch(Launch(FOLD, (ceil_div(down.rows, THREADS), rows, 1), THREADS), folded, stream)


def check_groups(shapes: Shapes, groups: Groups, visits: Visits, experts: int) -> None:
    """Raises TypeError unless ``groups`` are of so many visits to so many experts."""
    shapes.match("order", groups.order, np.int32, visits.count)
    shapes.match("tiles", groups.tiles, np.int32, num_tiles(visits.count, experts), 4)
    shapes.require(groups.size == tiles_for(visits.count, experts), f"tiles of {groups.size}")
