"""The operations of the forward pass on the CPU, in float32, by NumPy.

Rules. A row's bits depend on nothing but the row: elementwise operations and sums along a row are NumPy's own, products come from
products.py and attention.py. Whatever a damaged row computes (NaN, infinities) stays in that row. Weights are float32: 4 bytes for
each parameter.

Speed. A decode window is some 40 small NumPy calls beside the products of each layer, and the weights that stream through the cache
make each of them a cold one. So results go to buffers that stay, and the views of a product are made once for every layer.
Therefore one ``NumpyOps`` serves one stage: a result lives until the next product of that shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.engine.architecture import ExpertConfig
from strata.engine.attention import Copies, GridAttention, RowAttention, row_attentions
from strata.engine.experts import ExpertStore, LayerExperts
from strata.engine.kv import PagedKV
from strata.engine.mixture import Mixture
from strata.engine.products import Arena, Buffers, Floats, Matrix, RowFrame, cuts, grid_product
from strata.engine.routing import route
from strata.engine.rows import Layout, RowPart, plan
from strata.engine.threads import Threads, usable_cores
from strata.engine.tiles import has_small_kernels
from strata.messages import Window

ROWS_PER_PIECE = 64
FRAMED_ROWS = 64


def short_rows() -> int:
    """Up to how many rows of a block of 128 are cheaper row by row than padded to a whole one: measured on 2 cores, 52 and some 90.

    Another value changes bits, so it depends on nothing but the processor.
    """
    return 80 if has_small_kernels() else 48


@dataclass(frozen=True, slots=True)
class Plan:
    """A window's layout, and the attention of its parts."""

    layout: Layout
    attentions: tuple[RowAttention | GridAttention, ...]


@dataclass(frozen=True, slots=True)
class Routed:
    """A block's experts and what sends rows to them: the ``router`` matrix, and the ``bias`` of its choice, float32 [count]."""

    config: ExpertConfig
    router: Matrix
    bias: Floats | None
    experts: LayerExperts


class NumpyOps:
    """``threads``: how many compute, None for all usable cores. ``deterministic``: prompts row by row too. ``close`` when done.

    ``expert_bytes``: how much memory decoded experts may take, None for all of them (experts.py).
    """

    def __init__(self, threads: int | None = None, deterministic: bool = False, expert_bytes: int | None = None) -> None:
        self.threads = Threads(threads or usable_cores())
        self.deterministic = deterministic
        self._arena = Arena()
        self.mixture = Mixture(ExpertStore(self.threads, self._arena, expert_bytes), self.threads, self.swiglu)
        self._verified: dict[tuple[int, int], Matrix] = {}
        self._copies: Copies | None = None
        self._frames: dict[tuple[int, int, int], RowFrame] = {}
        self._buffers = Buffers()

    def close(self) -> None:
        self.threads.close()

    @contextmanager
    def window(self, window: Window, kv: PagedKV, group: int) -> Iterator[Plan]:
        """Within: the window's plan, for the operations that ask for one. ``group``: query heads per KV head."""
        layout = plan(window, kv.page_tokens, None if self.deterministic else short_rows())
        if self._copies is None:
            self._copies = Copies(kv, self.threads.count)
        attentions: list[RowAttention | GridAttention] = []
        for part in layout.parts:
            attentions += row_attentions(part, kv, group, self._copies) if isinstance(part, RowPart) else (GridAttention(part, kv),)
        with np.errstate(all="ignore"):
            yield Plan(layout, tuple(attentions))

    def matrix(self, parts: Sequence[Floats], bias: Floats | None = None) -> Matrix:
        """One matrix of all ``parts`` ([rows_i, columns]), their rows one after the other."""
        matrix = Matrix(sum(len(part) for part in parts), parts[0].shape[1], bias, self.threads.count, self._arena)
        np.concatenate(parts, out=matrix.weights)
        shape = matrix.rows, matrix.columns
        if shape not in self._verified:
            matrix.verify()
            self._verified[shape] = matrix
        matrix.row_at_once, matrix.grid_at_once = self._verified[shape].row_at_once, self._verified[shape].grid_at_once
        return matrix

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        """x / sqrt(mean(x^2) + eps) * weight along the last axis (Zhang and Sennrich 2019)."""
        root = np.matmul(x[..., None, :], x[..., :, None])[..., 0]
        root *= np.float32(1 / x.shape[-1])
        root += np.float32(eps)
        np.sqrt(root, out=root)
        result = np.divide(x, root)
        result *= weight
        return result

    def linear(self, x: Floats, matrix: Matrix, plan: Plan) -> Floats:
        """x [layout rows, columns] @ weights.T + bias: [layout rows, matrix.rows]."""
        parts = plan.layout.parts
        if len(parts) == 1 and isinstance(parts[0], RowPart):
            return self._biased(self._rows(x, matrix), matrix)
        out = self._buffers.take("linear", len(x), matrix.padded_rows)
        for part in parts:
            mine = slice(part.start, part.stop)
            if isinstance(part, RowPart):
                frame = RowFrame(matrix, mine.stop - mine.start)
                self.threads.run(*frame.product(x[mine], matrix))
                out[mine] = frame.out
            else:
                self.threads.run(*grid_product(x[mine], matrix, out[mine], self.threads.count))
        return self._biased(out, matrix)

    def logits(self, x: Floats, matrix: Matrix) -> Floats:
        """x [rows, columns] @ weights.T, always row by row: [rows, vocabulary], the caller's to keep."""
        if not len(x):  # a part of a prompt whose end is not reached
            return np.empty((0, matrix.rows), np.float32)
        frame = RowFrame(matrix, len(x))
        self.threads.run(*frame.product(x, matrix))
        return self._biased(frame.out, matrix)

    def _rows(self, x: Floats, matrix: Matrix) -> Floats:
        key = (len(x), matrix.padded_rows, matrix.columns)
        frame = self._frames.get(key)
        if frame is None:
            frame = RowFrame(matrix, len(x))
            if len(x) <= FRAMED_ROWS:
                self._frames[key] = frame
        self.threads.run(*frame.product(x, matrix))
        return frame.out

    @staticmethod
    def _biased(out: Floats, matrix: Matrix) -> Floats:
        out = out[:, : matrix.rows]
        if matrix.bias is not None:
            out += matrix.bias
        return out

    def rope(self, heads: Floats, turns: NDArray[np.complex64]) -> None:
        """Turn the first pairs of each head in place: ``heads`` [rows, heads, head_dim], ``turns`` [rows, 1, pairs]."""
        pairs = heads[..., : 2 * turns.shape[-1]].view(np.complex64)
        pairs *= turns

    def attention(self, queries: Floats, layer: int, plan: Plan) -> Floats:
        """Causal attention of ``queries`` [layout rows, heads, head_dim] over the plan's cache: [layout rows, heads * head_dim]."""
        rows, heads, dim = queries.shape
        kv_heads = plan.attentions[0].kv.heads
        scaled = np.multiply(queries, np.float32(1 / math.sqrt(dim))).reshape(rows, kv_heads, heads // kv_heads, dim)
        out = np.empty_like(scaled)
        for attention in plan.attentions:
            mine = slice(attention.part.start, attention.part.stop)
            own, result = scaled[mine], out[mine]
            if isinstance(attention, RowAttention):
                attention.run(own, layer, self.threads, result)
            else:
                self.threads.run(lambda piece: attention.piece(piece, own, layer, result), attention.pieces)
        return out.reshape(rows, heads * dim)

    def swiglu(self, gate_up: Floats) -> Floats:
        """silu(gate) * up of [rows, 2 * width], the gate first: [rows, width] (Shazeer 2020)."""
        width = gate_up.shape[1] // 2
        out = self._buffers.take("swiglu", len(gate_up), width)
        pieces = cuts(len(gate_up), len(gate_up) // ROWS_PER_PIECE)

        def work(piece: int) -> None:
            rows = pieces[piece]
            gate, up, result = gate_up[rows, :width], gate_up[rows, width:], out[rows]
            np.negative(gate, out=result)
            np.exp(result, out=result)
            result += 1
            np.divide(gate, result, out=result)
            result *= up

        self.threads.run(work, len(pieces))
        return out

    def routed(self, x: Floats, block: Routed, plan: Plan) -> Floats:
        """The weighted sum of each row's experts: [layout rows, width]. Router and experts row by row, pad rows not at all (zeros)."""
        layout = plan.layout
        rows = x[layout.real] if layout.padded else x
        chosen, weights = route(self._biased(self._rows(rows, block.router), block.router), block.bias, block.config)
        mixed = self.mixture.mix(rows, chosen, weights, block.experts)
        if not layout.padded:
            return mixed
        out = np.zeros_like(x)
        out[layout.real] = mixed
        return out
