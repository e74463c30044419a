"""The operations of the forward pass on a device: fused kernels over buffers that are allocated once.

A dense layer is eight launches: norm, q/k/v, heads into pages, attention, its output, norm, gate and up with SwiGLU, down, whatever
formats a file mixes. Between launches everything stays int8 but the residual stream and the rows of q, k, v.

``Workspace`` holds one window's intermediate results; smaller windows use the first rows of each buffer, so
a captured graph and the next window share memory and nothing is allocated while windows run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from strata.devices.base import Buffer, Device, KernelName, Stream
from strata.engine.families import ModelConfig
from strata.engine.kernel_weights import DeviceLayer
from strata.engine.window_upload import WindowRows
from strata.kernels import attention as attention_kernel
from strata.kernels import embed as embed_kernel
from strata.kernels import rms_norm as norm_kernel
from strata.kernels import store_heads as heads_kernel
from strata.kernels.add import KERNEL as ADD
from strata.kernels.add import add
from strata.kernels.attention import SplitSpace, attention, num_splits
from strata.kernels.embed import embed
from strata.kernels.matmul import linear, linear_name
from strata.kernels.pages import Pages, PageShape
from strata.kernels.parts import linear_parts, linear_swiglu_parts, parts_name, swiglu_parts_name
from strata.kernels.rms_norm import rms_norm
from strata.kernels.store_heads import Queries, allocate_queries, store_heads
from strata.kernels.tensors import Activations, Matrix, allocate_activations

HEAD_ROWS = 32  # rows of logits computed at once


def zeroed(device: Device, count: int, columns: int, stream: Stream) -> Activations:
    """Activations whose padding is zero, as kernels that write columns only want it."""
    room = allocate_activations(device, count, columns)
    for buffer in (room.codes, room.meta):
        device.upload(buffer, np.zeros(buffer.shape, buffer.dtype), stream)
    stream.synchronize()
    return room


@dataclass(frozen=True, slots=True)
class WindowSizes:
    """Rows of the largest window, rows of the largest decode window (pad rows included), positions of the longest context."""

    rows: int
    decode_rows: int
    context: int


class Workspace:
    """Buffers for windows of up to ``sizes`` on one device."""

    def __init__(self, device: Device, config: ModelConfig, pages: Pages, sizes: WindowSizes, stream: Stream) -> None:
        dim, heads, kv_heads, max_rows = config.head_dim, config.num_heads, config.num_kv_heads, sizes.rows
        self.hidden = device.allocate((max_rows, config.width), np.float32)
        self.delta = device.allocate((max_rows, config.width), np.float32)
        self.qkv = device.allocate((max_rows, heads + 2 * kv_heads, dim), np.float32)
        self.normed = zeroed(device, max_rows, config.width, stream)
        self.attended = zeroed(device, max_rows, heads * dim, stream)
        self.gated = zeroed(device, max_rows, config.ffn_width, stream)
        self.queries = allocate_queries(device, max_rows, heads, pages.shape)
        self.logits = device.allocate((HEAD_ROWS, config.vocab_size), np.float32)
        self.every = device.allocate((max_rows,), np.int32)
        self.splits = attention_kernel.allocate_splits(device, sizes.decode_rows, heads, pages, sizes.context, stream)
        device.upload(self.every, np.arange(max_rows, dtype=np.int32), stream)
        stream.synchronize()


class KernelOps:
    """Enqueues a window's operations on ``stream``; nothing here waits."""

    def __init__(self, device: Device, config: ModelConfig, pages: Pages, space: Workspace, stream: Stream) -> None:
        self.device, self.config, self.pages, self.space, self.stream = device, config, pages, space, stream

    def embed(self, rows: WindowRows, matrix: Matrix) -> None:
        """The residual stream begins: rows of the embedding."""
        embed(self.device, matrix, rows.tokens, self.space.hidden.rows(0, rows.count), self.stream)

    def norm(self, rows: Buffer, gamma: Buffer, add: bool) -> Activations:
        """RMSNorm of the residual stream's ``rows`` after adding the last product's result, if there is one."""
        space, out = self.space, self.space.normed.rows(0, rows.shape[0])
        delta = space.delta if add else None
        rms_norm(self.device, rows, space.hidden, delta, gamma, self.config.eps, out, self.stream)
        return out

    def block(self, index: int, layer: DeviceLayer, rows: WindowRows) -> None:
        """One layer. Its last product is in ``space.delta``: the next norm adds it."""
        space, count, every = self.space, rows.count, self.space.every.rows(0, rows.count)
        delta = space.delta.rows(0, count)
        attended = self._attention(index, layer, rows, self.norm(every, layer.attn_norm, add=index > 0))
        linear(self.device, layer.attn_output, attended, delta, self.stream)
        gated = space.gated.rows(0, count)
        linear_swiglu_parts(self.device, layer.gate_up, self.norm(every, layer.ffn_norm, add=True), gated, self.stream)
        linear(self.device, layer.down, gated, delta, self.stream)

    def _attention(self, index: int, layer: DeviceLayer, rows: WindowRows, x: Activations) -> Activations:
        space, count, device, stream = self.space, rows.count, self.device, self.stream
        qkv = space.qkv.rows(0, count)
        linear_parts(device, layer.qkv, x, qkv.view((count, qkv.size // count)), stream)
        queries = Queries(space.queries.codes.rows(0, count), space.queries.scales.rows(0, count))
        store_heads(device, qkv, rows.turns, layer.norms, rows.places, index, self.pages, queries, stream)
        attended = space.attended.rows(0, count)
        attention(device, queries, rows.places, index, self.pages, self._splits(rows), attended, stream)
        return attended

    def _splits(self, rows: WindowRows) -> SplitSpace | None:
        """The split space for a decode window, its grid cut to the window's context bucket."""
        if not rows.context:
            return None
        whole = self.space.splits
        room, heads, _, values = whole.partial.shape
        return SplitSpace(whole.partial.view((room, heads, num_splits(rows.context), values)), whole.arrived)

    def finish(self, rows: WindowRows) -> None:
        """The residual stream as the next stage takes it: the last product's result added."""
        add(self.device, self.space.hidden.rows(0, rows.count), self.space.delta.rows(0, rows.count), self.stream)

    def logits(self, rows: Buffer, gamma: Buffer, matrix: Matrix) -> Buffer:
        """float32 [rows, vocabulary] of at most HEAD_ROWS of the window's rows: the last sum, the last norm, the output matrix."""
        logits = self.space.logits.rows(0, rows.shape[0])
        linear(self.device, matrix, self.norm(rows, gamma, add=True), logits, self.stream)
        return logits


def kernels_of(
    config: ModelConfig, pages: PageShape, layers: Sequence[DeviceLayer], ends: Sequence[Matrix], counts: Sequence[int]
) -> Iterator[KernelName]:
    """Every kernel that windows of ``counts`` rows and prompts can need, to be compiled before the first window."""
    yield from (norm_kernel.PLAIN, norm_kernel.ADDED, ADD, heads_kernel.kernel_name(pages))
    for prompt in (False, True):
        yield attention_kernel.kernel_name(pages, config.group, prompt)
    for matrix in ends:
        yield embed_kernel.kernel_name(matrix.layout)
    plain = {matrix.layout for layer in layers for matrix in (layer.attn_output, layer.down)} | {matrix.layout for matrix in ends}
    qkv, gate_up = ({tuple(m.layout for m in getattr(layer, name)) for layer in layers} for name in ("qkv", "gate_up"))
    plain |= {layouts[0] for layouts in qkv if len(layouts) == 1}
    for count in counts:
        yield from (linear_name(layout, count) for layout in sorted(plain))
        yield from (parts_name(layouts, count) for layouts in sorted(qkv) if len(layouts) > 1)
        for layouts in sorted(gate_up):
            if len(layouts) == 1:
                yield linear_name(layouts[0], count, swiglu=True)
            else:
                yield swiglu_parts_name(layouts[0], layouts[1], count)
