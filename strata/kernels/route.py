"""Which experts each row goes through, decided on the device (route.cu): routing, and visits grouped by expert for the matrix units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels.check import Shapes, ceil_div, int32

MAX_EXPERTS, MAX_USED = 512, 32
TILE = 8  # visits
TILES = (1, 2, 3, 4)
EXPERTS_PER_BLOCK, THREADS = 8, 256
GROUP = KernelName("route", "group_visits")


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule, see route.cu. ``sigmoid``: else softmax. Raises ValueError for what the kernel cannot hold."""

    used: int
    sigmoid: bool
    normalised: bool
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.used <= MAX_USED and 1 <= self.groups_used <= self.groups <= 32):
            raise ValueError(f"{self.used} experts a row in {self.groups_used} of {self.groups} groups: up to {MAX_USED} and 32 are served")


@dataclass(frozen=True, slots=True)
class Router:
    """``weights`` float32 [experts, width]; ``bias`` float32 [experts], added for the choice alone, or None."""

    weights: Buffer
    bias: Buffer | None


@dataclass(frozen=True, slots=True)
class Visits:
    """A row at one of its experts: visit ``row * used + i``. ``ids`` int32, ``weights`` float32, [rows, used] each."""

    ids: Buffer
    weights: Buffer

    @property
    def used(self) -> int:
        return self.ids.shape[1]

    @property
    def count(self) -> int:
        return self.ids.size

    def rows(self, start: int, stop: int) -> Visits:
        return Visits(self.ids.rows(start, stop), self.weights.rows(start, stop))

    def check(self, shapes: Shapes) -> None:
        shapes.match("ids", self.ids, np.int32, "rows", "used")
        shapes.match("weights", self.weights, np.float32, "rows", "used")


@dataclass(frozen=True, slots=True)
class RouteSpace:
    """``logits`` float32 [any, experts]; ``arrived`` int32 [any], zero between launches."""

    logits: Buffer
    arrived: Buffer


@dataclass(frozen=True, slots=True)
class Groups:
    """Visits grouped by expert. ``order`` int32 [visits], ``tiles`` int32 [tiles, 4]; a tile is up to 8 * ``size`` visits."""

    order: Buffer
    tiles: Buffer
    size: int


def rows_per_block(count: int) -> int:
    """Rows that share a read of the router's weights."""
    return 1 if count <= 8 else 8


def kernel_name(count: int) -> KernelName:
    return KernelName("route", f"route<{rows_per_block(count)}>")


def allocate_route(device: Device, rows: int, experts: int, stream: Stream) -> RouteSpace:
    """For windows of up to ``rows`` rows."""
    space = RouteSpace(device.allocate((rows, experts), np.float32), device.allocate((rows,), np.int32))
    device.upload(space.arrived, np.zeros(space.arrived.shape, np.int32), stream)
    stream.synchronize()
    return space


def route(
    device: Device, hidden: Buffer, gamma: Buffer, eps: float, router: Router, rule: Routing, space: RouteSpace, visits: Visits,
    stream: Stream,
) -> None:  # fmt: skip
    """``visits`` of the rows of ``hidden`` float32 [rows, width], normed by ``gamma`` as rms_norm does, but not quantised."""
    shapes = Shapes("route", used=rule.used)
    visits.check(shapes)
    rows = shapes["rows"]
    shapes.match("hidden", hidden, np.float32, "rows", "width")
    shapes.match("gamma", gamma, np.float32, "width")
    shapes.match("router", router.weights, np.float32, "experts", "width")
    if router.bias is not None:
        shapes.match("bias", router.bias, np.float32, "experts")
    shapes.match("logits", space.logits, np.float32, "room", "experts")
    shapes.match("arrived", space.arrived, np.int32, "places")
    experts, width = shapes["experts"], shapes["width"]
    shapes.require(rows <= min(shapes["room"], shapes["places"]), f"{rows} rows in a space for {shapes['room']}")
    shapes.require(width % 4 == 0 and experts <= MAX_EXPERTS, f"{experts} experts over {width} columns")
    fits = experts % rule.groups == 0 and rule.used <= experts // rule.groups * rule.groups_used
    shapes.require(fits, f"{rule.used} of {experts} experts in {rule.groups_used} of {rule.groups} groups")
    bias = [router.weights, np.int32(0)] if router.bias is None else [router.bias, np.int32(1)]
    numbers = [int32(n) for n in (experts, rule.used, rule.groups, rule.groups_used, rule.sigmoid, rule.normalised)]
    arguments = [hidden, gamma, np.float32(eps), int32(rows), int32(width), router.weights, *bias, *numbers, np.float32(rule.scale)]
    grid = (ceil_div(experts, EXPERTS_PER_BLOCK), ceil_div(rows, rows_per_block(rows)), 1)
    outputs = [space.logits, space.arrived, visits.ids, visits.weights]
    device.launch(Launch(kernel_name(rows), grid, THREADS), [*arguments, *outputs], stream)


def tiles_for(visits: int, experts: int) -> int:
    """Tiles of 8 that a block of the grouped products computes, for so many visits spread evenly."""
    return min(ceil_div(ceil_div(visits, experts), TILE), TILES[-1])


def num_tiles(visits: int, experts: int) -> int:
    """Tiles that there is room for, whatever the visits' experts are."""
    return visits // (TILE * tiles_for(visits, experts)) + experts


def most_tiles(rows: int, used: int, experts: int) -> int:
    """Room that suffices for windows of up to ``rows`` rows."""
    return rows * used // TILE + experts


def group_visits(device: Device, visits: Visits, experts: int, space: Groups, stream: Stream) -> Groups:
    """The visits grouped, in the first places of ``space``."""
    shapes = Shapes("group_visits")
    visits.check(shapes)
    size, tiles = tiles_for(visits.count, experts), num_tiles(visits.count, experts)
    shapes.match("order", space.order, np.int32, "room")
    shapes.match("tiles", space.tiles, np.int32, "tile_room", 4)
    fits = visits.count <= shapes["room"] and tiles <= shapes["tile_room"]
    shapes.require(fits, f"{visits.count} visits in a space for {shapes['room']}")
    groups = Groups(space.order.rows(0, visits.count), space.tiles.rows(0, tiles), size)
    arguments = [visits.ids, int32(visits.count), int32(TILE * size), groups.order, groups.tiles]
    device.launch(Launch(GROUP, (experts, 1, 1), THREADS), arguments, stream)
    return groups
