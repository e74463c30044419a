"""The measurements of tools/device_check.py: every figure through the engine's own launchers, time taken around replayed graphs.

A graph's replay costs the host the same whatever is in it, so that short kernels are measured and not Python. Weights rotate over more
memory than a device's cache holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.devices.base import Buffer, Device, Stream
from strata.kernels.add import add
from strata.kernels.attention import allocate_splits, attention, num_splits
from strata.kernels.matvec import matvec
from strata.kernels.pages import Pages, PageShape, RowPlaces, scale_group
from strata.kernels.store_heads import Queries
from strata.kernels.tensors import Activations, Matrix, allocate_activations, put_grid, put_matrix
from strata.weights.formats import BY_NAME
from strata.weights.layouts import LAYOUTS
from strata.weights.recode import recode

LAYOUT_FORMATS = {"packed3": "IQ3_S", "odd4": "IQ3_S", "flat8": "Q8_0"}
ROWS = (1, 2, 4, 8)
PAGE_TOKENS = 64
KV_KINDS = ("int8", "f16")


@dataclass(frozen=True)
class Sizes:
    """``copy``: bytes; ``matrix``: rows, columns; ``rotate``: bytes of weights; ``contexts`` in tokens; ``heads``: of queries, of keys,
    their dimensions; ``nodes`` of the graph of the launch test; ``seconds`` of a measurement at least."""

    copy: int
    matrix: tuple[int, int]
    rotate: int
    contexts: tuple[int, ...]
    heads: tuple[int, int, int]
    nodes: int
    seconds: float


class Meter:
    """A device, a stream, and how long to measure."""

    def __init__(self, device: Device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.stream: Stream = device.stream()

    def seconds(self, enqueue: Callable[[], object]) -> float:
        """Seconds of what ``enqueue`` enqueues, captured once and replayed until enough time has passed."""
        with self.device.capture(self.stream) as graph:
            enqueue()
        return self.repeated(lambda: graph.replay(self.stream))

    def repeated(self, work: Callable[[], object]) -> float:
        """Seconds of one ``work`` among as many, all enqueued before the last is waited for."""
        work()
        self.stream.synchronize()
        count = 1
        while True:
            started = time.perf_counter()
            for _ in range(count):
                work()
            self.stream.synchronize()
            took = time.perf_counter() - started
            if took >= self.sizes.seconds:
                return took / count
            count *= 2

    def filled(self, shape: tuple[int, ...], dtype: type[np.generic], byte: int) -> Buffer:
        """A buffer of equal bytes, filled by doubling copies."""
        buffer = self.device.allocate(shape, dtype)
        flat = buffer.view((buffer.nbytes,), np.uint8)
        done = min(1 << 16, flat.size)
        self.device.upload(flat.view((done,)), np.full(done, byte, np.uint8), self.stream)
        while done < flat.size:
            step = min(done, flat.size - done)
            self.device.copy(flat.view((step,), offset=done), flat.view((step,)), self.stream)
            done += step
        self.stream.synchronize()
        return buffer


def copy_bandwidth(meter: Meter) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    source, target = (meter.filled((meter.sizes.copy,), np.uint8, 1) for _ in range(2))
    return 2 * meter.sizes.copy / meter.repeated(lambda: meter.device.copy(target, source, meter.stream))


def matvec_rates(meter: Meter, bandwidth: float) -> list[dict[str, Any]]:
    """A line for each layout and number of rows: time of one product, bytes a second, share of the copy's bandwidth."""
    rows, columns = meter.sizes.matrix
    grid, lines = put_grid(meter.device, meter.stream), []
    for layout in LAYOUT_FORMATS:
        matrices = rotating(meter, layout, grid)
        size = matrices[0].codes.nbytes + matrices[0].scales.nbytes + matrices[0].steps.nbytes
        for count in ROWS:
            x = activations(meter, count, columns)
            y = meter.device.allocate((count, rows), np.float32)

            def all_of_them() -> None:
                for matrix in matrices:
                    matvec(meter.device, matrix, x, y, meter.stream)

            matvec(meter.device, matrices[0], x, y, meter.stream)  # compiled before the capture
            took = meter.seconds(all_of_them) / len(matrices)
            lines.append({
                "layout": layout, "rows": count, "us": round(1e6 * took, 2), "gb_s": round(size / took / 1e9, 1),
                "share": round(size / took / bandwidth, 3),
            })  # fmt: skip
    return lines


def rotating(meter: Meter, layout: str, grid: Buffer) -> list[Matrix]:
    """Equal matrices that together are larger than a cache."""
    rows, columns = meter.sizes.matrix
    format, rng = BY_NAME[LAYOUT_FORMATS[layout]], np.random.default_rng(3)
    blocks = rng.integers(0, 256, format.size(rows * columns), dtype=np.uint8).view(format.dtype)
    blocks["d"] = rng.uniform(0.0001, 0.001, len(blocks))
    tensor = recode(format, blocks.view(np.uint8), rows, columns, LAYOUTS[layout])
    return [put_matrix(meter.device, tensor, grid, meter.stream) for _ in range(max(2, meter.sizes.rotate // tensor.nbytes))]


def activations(meter: Meter, count: int, columns: int) -> Activations:
    """Rows of the code 1 with a scale of about 0.01; the sums are those of 16 ones."""
    x = allocate_activations(meter.device, count, columns)
    meter.device.upload(x.codes, np.ones(x.codes.shape, np.int8), meter.stream)
    meta = np.empty(x.meta.shape, np.uint32)
    meta[..., 0], meta[..., 1] = np.float32(0.01).view(np.uint32), 16 | 16 << 16
    meter.device.upload(x.meta, meta, meter.stream)
    meter.stream.synchronize()
    return x


def attention_rates(meter: Meter, bandwidth: float) -> list[dict[str, Any]]:
    """A line for each kind of pages and context: one decode row of one layer, its time, bytes of keys and values a second, share of the
    bandwidth."""
    return [line for kind in KV_KINDS for line in attention_lines(meter, bandwidth, kind)]


def attention_lines(meter: Meter, bandwidth: float, kind: str) -> list[dict[str, Any]]:
    heads, kv_heads, dim = meter.sizes.heads
    device, longest, lines = meter.device, max(meter.sizes.contexts), []
    shape = PageShape(1, kv_heads, dim, PAGE_TOKENS, kind)
    num_pages = -(-longest // PAGE_TOKENS)
    # Bytes of 0x20: codes of 32 with scales of 0.008, or halves of 0.008.
    pages = Pages(shape, meter.filled((num_pages, shape.page_bytes), np.int8, 0x20))
    table = device.allocate((1, num_pages), np.int32)
    device.upload(table, np.arange(num_pages, dtype=np.int32)[None], meter.stream)
    scales = meter.filled((1, heads, dim // scale_group(dim)), np.float32, 0x3C)  # of about 0.011
    queries = Queries(meter.filled((1, heads, shape.query_bytes), np.int8, 0x20 if kind == "f16" else 1), scales)
    out = activations(meter, 1, heads * dim)
    for context in meter.sizes.contexts:
        splits = allocate_splits(device, 1, heads, shape, context, meter.stream)
        position, row = (device.allocate((1,), np.int32) for _ in range(2))
        device.upload(position, np.array([context - 1], np.int32), meter.stream)
        device.upload(row, np.zeros(1, np.int32), meter.stream)
        places = RowPlaces(position, row, table)

        def launch() -> None:
            attention(device, queries, places, 0, pages, splits, out, meter.stream)

        launch()
        took, size = meter.seconds(launch), context * shape.layer_bytes // PAGE_TOKENS
        lines.append({
            "kv": kind, "context": context, "splits": num_splits(context), "us": round(1e6 * took, 2), "gb_s": round(size / took / 1e9, 1),
            "share": round(size / took / bandwidth, 3),
        })  # fmt: skip
    return lines


def launch_cost(meter: Meter) -> dict[str, float]:
    """Microseconds of one small launch from Python, of a graph's replay, and of each of its nodes."""
    hidden, delta = (meter.filled((1, 256), np.float32, 0) for _ in range(2))

    def launch() -> None:
        add(meter.device, hidden, delta, meter.stream)

    def several() -> None:
        for _ in range(meter.sizes.nodes):
            launch()

    single, short, long = meter.repeated(launch), meter.seconds(launch), meter.seconds(several)
    return {
        "launch_us": round(1e6 * single, 2), "graph_us": round(1e6 * short, 2),
        "node_us": round(1e6 * (long - short) / max(1, meter.sizes.nodes - 1), 3),
    }  # fmt: skip
