"""What a draft block takes besides a layer's kernels (draft.cu): its input from an embedding and a hidden row, and hidden rows moved."""

from __future__ import annotations

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Launch, Stream
from strata.kernels.check import Shapes, int32
from strata.kernels.tensors import Activations

JOIN, MOVE, CLEAR = (KernelName("draft", entry) for entry in ("join_norms", "move_rows", "clear"))
THREADS = 256


def join_norms(
    device: Device, embedding: Buffer, store: Buffer, sources: Buffer, norms: tuple[Buffer, Buffer], eps: float, out: Activations,
    stream: Stream,
) -> None:  # fmt: skip
    """``out`` [rows, 2 width] = the norm of ``embedding`` float32 [rows, width], then that of ``store[sources[i]]``, quantised.

    ``store`` float32 [any, width]; ``sources`` int32 [rows], below 0 for zeros; ``norms`` float32 [width]: of embedding and hidden row.
    """
    shapes = Shapes("join_norms", rows=out.count)
    out.check("join_norms")
    shapes.match("embedding", embedding, np.float32, "rows", "width")
    shapes.match("store", store, np.float32, "room", "width")
    shapes.match("sources", sources, np.int32, "rows")
    for name, gamma in zip(("enorm", "hnorm"), norms, strict=True):
        shapes.match(name, gamma, np.float32, "width")
    shapes.require(out.columns == 2 * shapes["width"], f"{out.columns} outputs for two rows of {shapes['width']}")
    arguments = [embedding, store, sources, *norms, np.float32(eps), int32(shapes["width"]), int32(out.width), out.codes, out.meta]
    device.launch(Launch(JOIN, (out.count, 1, 1), THREADS), arguments, stream)


def move_rows(device: Device, store: Buffer, moves: Buffer, stream: Stream) -> None:
    """``store[to] = store[from]`` for ``moves`` int32 [count, 2] of (from, to); one below 0 does nothing. No row may be both."""
    shapes = Shapes("move_rows")
    shapes.match("store", store, np.float32, "room", "width")
    shapes.match("moves", moves, np.int32, "count", 2)
    device.launch(Launch(MOVE, (shapes["count"], 1, 1), THREADS), [store, moves, int32(shapes["width"])], stream)


def clear(device: Device, lines: Buffer, offset: int, count: int, stream: Stream) -> None:
    """Bytes ``offset .. offset + count - 1`` of each of ``lines`` int8 [any, bytes] become zero; all three are multiples of 4."""
    shapes = Shapes("clear")
    shapes.match("lines", lines, np.int8, "lines", "bytes")
    fits = 0 <= offset <= offset + count <= shapes["bytes"] and not (offset % 4 or count % 4 or shapes["bytes"] % 4)
    shapes.require(fits, f"bytes {offset} to {offset + count} of {shapes['bytes']}")
    arguments: list[Buffer | np.int64] = [lines, np.int64(shapes["bytes"]), np.int64(offset), np.int64(count)]
    device.launch(Launch(CLEAR, (shapes["lines"], 1, 1), THREADS), arguments, stream)
