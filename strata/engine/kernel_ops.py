"""The operations of the forward pass on a device: fused kernels over buffers that are allocated once (device_space.py).

A dense layer is eight launches: norm, q/k/v, heads into pages, attention, its output, norm, gate and up with SwiGLU, down, whatever
formats a file mixes. With experts it is nine (the router, and gate, up and down of the experts chosen), eleven where all rows share another
one, and two more where there are rows enough to group by expert. Between launches everything stays int8 but the residual stream, the
rows of q, k, v, and what the router reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strata.devices.base import Buffer, Device, KernelName, Stream
from strata.engine.architecture import ExpertConfig
from strata.engine.device_space import Workspace
from strata.engine.families import ModelConfig
from strata.engine.kernel_weights import DeviceLayer, DeviceRouted
from strata.engine.window_upload import WindowRows
from strata.kernels import attention as attention_kernel
from strata.kernels import embed as embed_kernel
from strata.kernels import experts as expert_kernels
from strata.kernels import rms_norm as norm_kernel
from strata.kernels import route as route_kernel
from strata.kernels import store_heads as heads_kernel
from strata.kernels.add import KERNEL as ADD
from strata.kernels.add import add
from strata.kernels.attention import SplitSpace, attention, num_splits
from strata.kernels.embed import embed
from strata.kernels.experts import expert_down, expert_swiglu, one_by_one
from strata.kernels.matmul import linear, linear_name
from strata.kernels.pages import Pages, PageShape
from strata.kernels.parts import linear_parts, linear_swiglu_parts, parts_name, swiglu_parts_name
from strata.kernels.rms_norm import rms_norm
from strata.kernels.route import Routing, group_visits, route
from strata.kernels.store_heads import Queries, store_heads
from strata.kernels.tensors import Activations, Matrix


def routing_of(experts: ExpertConfig) -> Routing:
    """The kernel's rule. Raises ValueError for what it cannot hold."""
    return Routing(
        experts.used, experts.gate == "sigmoid", experts.normalised, experts.scale, experts.groups, experts.groups_used
    )  # fmt: skip


class KernelOps:
    """Enqueues a window's operations on ``stream``; nothing here waits. ``kept``: where ``keep`` leaves rows, float32 [rows, width]."""

    def __init__(self, device: Device, config: ModelConfig, pages: Pages, space: Workspace, stream: Stream) -> None:
        self.device, self.config, self.pages, self.space, self.stream = device, config, pages, space, stream
        self.kept: Buffer | None = None
        self._routing = None if config.experts is None else routing_of(config.experts)

    def embed(self, rows: WindowRows, matrix: Matrix) -> None:
        """The residual stream begins: rows of the embedding."""
        embed(self.device, matrix, rows.tokens, self.space.hidden.rows(0, rows.count), self.stream)

    def norm(self, rows: Buffer, gamma: Buffer, add: bool, floats: Buffer | None = None) -> Activations:
        """RMSNorm of the residual stream's ``rows`` after adding the last product's result, if there is one."""
        space, out = self.space, self.space.normed.rows(0, rows.shape[0])
        delta = space.delta if add else None
        rms_norm(self.device, rows, space.hidden, delta, gamma, self.config.eps, out, self.stream, floats)
        return out

    def block(self, index: int, layer: DeviceLayer, rows: WindowRows, add: bool) -> None:
        """One layer; ``add``: the product before it is in ``space.delta``, as the last of this one will be: the next norm adds it."""
        space, count = self.space, rows.count
        self.store(index, layer, rows, add)
        attended, queries = space.attended.rows(0, count), self._queries(count)
        attention(self.device, queries, rows.places, index, self.pages, self._splits(rows), attended, self.stream)
        linear(self.device, layer.attn_output, attended, space.delta.rows(0, count), self.stream)
        self._feed_forward(layer, count)

    def store(self, index: int, layer: DeviceLayer, rows: WindowRows, add: bool) -> None:
        """The first part of a layer: queries, and keys and values into their pages."""
        count = rows.count
        qkv = self.space.qkv.rows(0, count)
        x = self.norm(self.space.every.rows(0, count), layer.attn_norm, add)
        linear_parts(self.device, layer.qkv, x, qkv.view((count, qkv.size // count)), self.stream)
        store_heads(self.device, qkv, rows.turns, layer.norms, rows.places, index, self.pages, self._queries(count), self.stream)

    def _queries(self, count: int) -> Queries:
        return Queries(self.space.queries.codes.rows(0, count), self.space.queries.scales.rows(0, count))

    def _splits(self, rows: WindowRows) -> SplitSpace | None:
        """The split space for a decode window, its grid cut to the window's context bucket."""
        if not rows.context:
            return None
        whole = self.space.splits
        room, heads, _, values = whole.partial.shape
        return SplitSpace(whole.partial.view((room, heads, num_splits(rows.context), values)), whole.arrived)

    def _feed_forward(self, layer: DeviceLayer, count: int) -> None:
        delta = self.space.delta.rows(0, count)
        x = self.norm(self.space.every.rows(0, count), layer.ffn_norm, add=True)
        if layer.dense is not None:
            gated = self.space.gated[layer.dense.down.columns].rows(0, count)
            linear_swiglu_parts(self.device, layer.dense.gate_up, x, gated, self.stream)
            linear(self.device, layer.dense.down, gated, delta, self.stream)
        if layer.routed is not None:
            self._experts(layer, layer.routed, x, delta)

    def _experts(self, layer: DeviceLayer, routed: DeviceRouted, x: Activations, delta: Buffer) -> None:
        """Each row through its experts, their sum into ``delta``, to which the shared expert's output is added if it is there."""
        space, device, stream, count = self.space.experts, self.device, self.stream, x.count
        assert space is not None and self._routing is not None
        visits, hidden = space.visits.rows(0, count), space.hidden.rows(0, count * space.visits.used)
        rows = self.space.hidden.rows(0, count)
        route(device, rows, layer.ffn_norm, self.config.eps, routed.router, self._routing, space.route, visits, stream)
        groups = None
        if not one_by_one(routed.layouts, count):
            groups = group_visits(device, visits, routed.gate.count, space.groups, stream)
        expert_swiglu(device, routed.gate, routed.up, x, visits, groups, hidden, stream)
        shared = None if layer.dense is None else delta
        expert_down(device, routed.down, hidden, visits, groups, space.part, shared, delta, stream)

    def finish(self, rows: WindowRows) -> None:
        """The residual stream as the next stage takes it: the last product's result added."""
        add(self.device, self.space.hidden.rows(0, rows.count), self.space.delta.rows(0, rows.count), self.stream)

    def keep(self, count: int, gamma: Buffer) -> None:
        """The last sum and the last norm of the first ``count`` rows, whose results are kept as floats."""
        self.norm(self.space.every.rows(0, count), gamma, add=True, floats=self.kept)

    def logits(self, rows: Buffer, gamma: Buffer, matrix: Matrix, add: bool = True) -> Buffer:
        """float32 [rows, vocabulary] of at most HEAD_ROWS of the window's rows: the last sum (``add``), the last norm, the output matrix.

        With the last sum the normed rows are kept, where they are to be kept.
        """
        assert self.space.logits is not None
        logits = self.space.logits.rows(0, rows.shape[0])
        linear(self.device, matrix, self.norm(rows, gamma, add, self.kept if add else None), logits, self.stream)
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
    dense = [layer.dense for layer in layers if layer.dense is not None]
    plain = {matrix.layout for matrix in (*ends, *(layer.attn_output for layer in layers), *(one.down for one in dense))}
    qkv = {tuple(matrix.layout for matrix in layer.qkv) for layer in layers}
    gate_up = {tuple(matrix.layout for matrix in one.gate_up) for one in dense}
    plain |= {layouts[0] for layouts in qkv if len(layouts) == 1}
    for count in counts:
        yield from (linear_name(layout, count) for layout in sorted(plain))
        yield from (parts_name(layouts, count) for layouts in sorted(qkv) if len(layouts) > 1)
        for layouts in sorted(gate_up):
            if len(layouts) == 1:
                yield linear_name(layouts[0], count, swiglu=True)
            else:
                yield swiglu_parts_name(layouts[0], layouts[1], count)
        yield from expert_kernels_of(config, layers, count)


def expert_kernels_of(config: ModelConfig, layers: Sequence[DeviceLayer], count: int) -> Iterator[KernelName]:
    """Those of windows of ``count`` rows through experts."""
    if config.experts is None:
        return
    yield from (route_kernel.kernel_name(count), route_kernel.GROUP)
    for layouts in sorted({layer.routed.layouts for layer in layers if layer.routed is not None}):
        widths = config.width, config.experts.width
        yield from expert_kernels.kernels_for(layouts, widths, config.experts.count, config.experts.used, count)
