"""How fast a device reads weights in each layout, measured once per kind of device and kept on disk.

One row's product with matrices that together are larger than any cache, in a graph, as decoding runs it. Devices of one name count as one
kind, and a kind is measured again only when the kernels change, so that a split and a choice of layout do not change from start
to start. The emulated device is never measured: its times mean nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from strata.devices.base import Buffer, Device, Stream
from strata.devices.source import cache_key, default_cache, write_atomically
from strata.engine.stage_cost import Rates
from strata.kernels.matmul import linear, linear_name
from strata.kernels.tensors import Activations, Matrix, allocate_activations, put_grid
from strata.weights.formats import Format
from strata.weights.gguf import GGUFFile
from strata.weights.layouts import LAYOUTS
from strata.weights.recode import layouts_for

log = logging.getLogger(__name__)

MATRIX = (4096, 4096)
ROTATED = 1 << 28
"""Bytes of matrices that take turns: more than the largest last-level cache of a GPU."""
REPLAYS = 8


def needed_rates(file: GGUFFile, devices: Sequence[Device], cache: Path | None) -> list[Rates]:
    """As ``rates_of`` for the layouts of a model's matrices, where there is a choice to be made by them: of a cut, or of a layout."""
    found = {tensor.type for _, tensor in file.tensors.items() if len(tensor.shape) > 1}
    if len(devices) == 1 and all(len(layouts_for(format)) == 1 for format in found):
        return [None]
    return rates_of(devices, layouts_of(found), cache)


def layouts_of(formats: Iterable[Format]) -> list[str]:
    """Every layout that tensors of these formats may get."""
    return sorted({layout.name for format in formats for layout in layouts_for(format)})


def rates_of(devices: Sequence[Device], layouts: Sequence[str], cache: Path | None = None) -> list[Rates]:
    """Bytes a second of each device in each of ``layouts``; None for one that is not measured."""
    kinds = {device.info.name: device for device in devices}
    rates = {name: known_rates(device, layouts, cache or default_cache()) for name, device in kinds.items()}
    return [rates[device.info.name] for device in devices]


def known_rates(device: Device, layouts: Sequence[str], cache: Path) -> Rates:
    """Of one device, from the folder of compiled kernels if its kind was measured before."""
    if not device.info.arch:
        return None
    path = cache / f"rates-{cache_key('matvec', (device.info.name, str(device.info.arch)))}.json"
    rates = read_rates(path)
    missing = [layout for layout in layouts if layout not in rates]
    if missing:
        rates |= measure_rates(device, missing)
        write_atomically(path, json.dumps({"device": device.info.name, "bytes_per_second": rates}).encode())
        told = ", ".join(f"{layout} {rates[layout] / 1e9:.0f}" for layout in missing)
        log.info("%s reads weights at these GB/s, measured: %s; kept in %s", device.info.name, told, path)
    return rates


def read_rates(path: Path) -> dict[str, float]:
    """What was kept; nothing where the file is missing or not ours."""
    try:
        kept = json.loads(path.read_text())["bytes_per_second"]
        return {str(layout): float(rate) for layout, rate in kept.items() if float(rate) > 0}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def measure_rates(device: Device, layouts: Sequence[str]) -> dict[str, float]:
    """Bytes a second of one row's products in each layout."""
    device.compile([linear_name(layout, 1) for layout in layouts])
    stream = device.stream()
    grid, x = put_grid(device, stream), zero_row(device, MATRIX[1], stream)
    y = device.allocate((1, MATRIX[0]), np.float32)
    return {layout: measure(device, empty_matrices(device, layout, grid), x, y, stream) for layout in layouts}


def measure(device: Device, matrices: Sequence[Matrix], x: Activations, y: Buffer, stream: Stream) -> float:
    with device.capture(stream) as graph:
        for matrix in matrices:
            linear(device, matrix, x, y, stream)
    graph.replay(stream)
    start, end = device.timed_event(), device.timed_event()
    stream.record(start)
    for _ in range(REPLAYS):
        graph.replay(stream)
    stream.record(end)
    stream.synchronize()
    size = sum(plane.nbytes for matrix in matrices for plane in (matrix.codes, matrix.scales, matrix.steps))
    return REPLAYS * size / device.seconds_between(start, end)


def zero_row(device: Device, columns: int, stream: Stream) -> Activations:
    x = allocate_activations(device, 1, columns)
    for buffer in (x.codes, x.meta):
        device.upload(buffer, np.zeros(buffer.shape, buffer.dtype), stream)
    stream.synchronize()
    return x


def empty_matrices(device: Device, layout: str, grid: Buffer) -> list[Matrix]:
    """Matrices of whatever the memory holds: a product takes as long with any weights."""
    rows, columns = MATRIX
    shapes = LAYOUTS[layout].plane_shapes(rows, columns)
    count = max(2, min(ROTATED, device.memory().free // 8) // LAYOUTS[layout].bytes(rows, columns))
    planes = [[device.allocate(shape, kind) for shape, kind in zip(shapes, (np.uint8, np.uint16, np.uint8))] for _ in range(count)]
    return [Matrix(layout, rows, columns, codes, scales, steps, grid) for codes, scales, steps in planes]
