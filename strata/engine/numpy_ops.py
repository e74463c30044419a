"""The operations of the forward pass on the CPU, in float32, by NumPy.

Rules. A row's bits depend on nothing but the row: elementwise operations and sums along a row are NumPy's own, products come from
products.py and attention.py. Work is shared among threads in pieces that are fixed by shapes. Whatever a damaged row computes
(NaN, infinities) stays in that row. Weights are float32: 4 bytes for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.engine.attention import RowAttention, grid_attention
from strata.engine.kv import PagedKV
from strata.engine.products import Matrix, grid_product, multiply, row_product
from strata.engine.rows import Layout, RowPart, plan
from strata.engine.threads import Threads, share, usable_cores
from strata.messages import Window

Floats = NDArray[np.float32]
ROWS_WORTH_SHARING = 32
TILES_WORTH_SHARING = 48


class NumpyOps:
    """``threads``: how many compute, None for all usable cores. ``deterministic``: prompts row by row too. ``close`` when done."""

    def __init__(self, threads: int | None = None, deterministic: bool = False) -> None:
        self.threads = Threads(threads or usable_cores())
        self.deterministic = deterministic

    def close(self) -> None:
        self.threads.close()

    def plan(self, window: Window, page_tokens: int) -> Layout:
        return plan(window, page_tokens, grid=not self.deterministic)

    def matrix(self, parts: Sequence[Floats], bias: Floats | None = None) -> Matrix:
        """One matrix of all ``parts`` ([rows_i, columns]), their rows one after the other."""
        matrix = Matrix(sum(len(part) for part in parts), parts[0].shape[1], bias)
        np.concatenate(parts, out=matrix.weights)
        return matrix

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        """x / sqrt(mean(x^2) + eps) * weight along the last axis (Zhang and Sennrich 2019)."""
        mean = np.matmul(x[..., None, :], x[..., :, None])[..., 0]
        mean *= np.float32(1 / x.shape[-1])
        mean += np.float32(eps)
        np.sqrt(mean, out=mean)
        result = np.divide(x, mean)
        result *= weight
        return result

    def linear(self, x: Floats, matrix: Matrix, layout: Layout) -> Floats:
        """x [layout rows, columns] @ weights.T + bias: [layout rows, matrix.rows]."""
        out = np.empty((len(x), matrix.padded_rows), np.float32)
        for part in layout.parts:
            product = row_product if isinstance(part, RowPart) else grid_product
            multiply(self.threads, product(x[part.start : part.stop], matrix, out[part.start : part.stop]))
        return self._biased(out, matrix)

    def logits(self, x: Floats, matrix: Matrix) -> Floats:
        """x [rows, columns] @ weights.T, always row by row: [rows, vocabulary]."""
        out = np.empty((len(x), matrix.padded_rows), np.float32)
        multiply(self.threads, row_product(x, matrix, out))
        return self._biased(out, matrix)

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

    def attention(self, queries: Floats, kv: PagedKV, layer: int, layout: Layout) -> Floats:
        """Causal attention of ``queries`` [layout rows, heads, head_dim] over the cache: [layout rows, heads * head_dim]."""
        rows, heads, dim = queries.shape
        kv_heads = kv.data.shape[3]
        scaled = (queries * np.float32(1 / math.sqrt(dim))).reshape(rows, kv_heads, heads // kv_heads, dim)
        out = np.empty_like(scaled)
        for part in layout.parts:
            mine = slice(part.start, part.stop)
            if isinstance(part, RowPart):
                attention = RowAttention(scaled[mine], kv, layer, part)
                if part.num_tiles >= TILES_WORTH_SHARING:
                    multiply(self.threads, attention.work)
                else:
                    attention.work(0, 1)
                attention.merge(out[mine])
            else:
                multiply(self.threads, grid_attention(scaled[mine], kv, layer, part, out[mine]))
        return out.reshape(rows, heads * dim)

    def swiglu(self, gate_up: Floats) -> Floats:
        """silu(gate) * up of [rows, 2 * width], the gate first: [rows, width] (Shazeer 2020)."""
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = np.empty((rows, width), np.float32)

        def work(index: int) -> None:
            mine = slice(*share(rows, index, self.threads.count if rows >= ROWS_WORTH_SHARING else 1))
            gate, up, result = gate_up[mine, :width], gate_up[mine, width:], out[mine]
            np.negative(gate, out=result)
            np.exp(result, out=result)
            result += 1
            np.divide(gate, result, out=result)
            result *= up

        if rows >= ROWS_WORTH_SHARING:
            self.threads.run(work)
        else:
            work(0)
        return out
