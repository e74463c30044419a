"""The forward pass of a decoder, in words: embed, blocks, head. One text for every device; ``ops`` does the arithmetic.

A stage holds the weights and the KV cache of its own span of layers. The first embeds tokens, the last applies the final norm and the
output matrix, to the rows that need logits only. Between stages travels the residual stream, float32 [rows, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata.engine.families import ModelConfig
from strata.engine.kv import PagedKV
from strata.engine.numpy_ops import NumpyOps, Plan, Routed
from strata.engine.products import Matrix
from strata.engine.rope import Rope, interleave
from strata.engine.rows import Layout, wanted_rows
from strata.messages import Tokens, Window
from strata.weights.formats import dequantize, dequantize_blocks
from strata.weights.gguf import GGUFFile, Tensor

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Dense:
    """A network that every row goes through: ``gate_up`` joined, so that one product serves both."""

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block. q, k, v are joined, so that one product serves them; q and k rows are interleaved.

    ``qk_norm`` float32 [heads + KV heads, head_dim]: the weights of q's and k's norm, head by head. ``routed``: experts, and ``dense``: the
    block's network, or the expert that all share; a block has one of them or both.
    """

    attn_norm: Floats
    qkv: Matrix
    qk_norm: Floats | None
    attn_output: Matrix
    ffn_norm: Floats
    dense: Dense | None
    routed: Routed | None


class StageModel:
    """Layers ``span`` of a model, to which ``kv``'s first layers belong. Raises ModelError for weights that cannot be read.

    Where ``keeps_hidden`` is set, the last stage leaves in ``last_hidden`` what the head of a drafter needs: float32 [rows, width] of the
    window just run, all its rows, after the final norm.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, span: range, ops: NumpyOps, kv: PagedKV) -> None:
        self.config, self.ops, self.kv = config, ops, kv
        self.is_first, self.is_last = span.start == 0, span.stop == config.num_layers
        self.keeps_hidden, self.last_hidden = False, np.empty((0, config.width), np.float32)
        weights = Weights(file, config, ops)
        self.rope = Rope(config.rope, weights.optional("rope_freqs.weight"))
        self.layers = [weights.layer(index) for index in span]
        if self.is_last:
            self.output_norm = weights.vector("output_norm.weight")
            self.output = weights.matrix(["token_embd.weight" if config.tied else "output.weight"])
        if self.is_first:
            self.embedding = Embedding(file.tensors["token_embd.weight"], self.output if self.is_last and config.tied else None)

    def forward(self, window: Window, hidden: Floats | None) -> Floats:
        """One window through this stage.

        ``hidden`` float32 [rows, width], rows in the window's order; None on the first stage. Returns the same shape, or on the last
        stage the logits [wanted rows, vocabulary] (see rows.wanted_rows). The window's keys and values are in the cache afterwards.
        """
        with self.ops.window(window, self.kv, self.config.group) as plan:
            layout = plan.layout
            x = self._enter(layout, hidden)
            if len(layout.fresh):
                self.kv.clear(layout.fresh)
            turns = self.rope.turns(layout.positions)
            for index, layer in enumerate(self.layers):
                self.block(x, index, layer, plan, turns)
            if not self.is_last:
                return x[layout.real]
            wanted = list(wanted_rows(window))
            if not self.keeps_hidden:
                return self.ops.logits(self.ops.rms_norm(x[layout.real[wanted]], self.output_norm, self.config.eps), self.output)
            self.last_hidden = self.ops.rms_norm(x[layout.real], self.output_norm, self.config.eps)
            return self.ops.logits(self.last_hidden[wanted], self.output)

    def _enter(self, layout: Layout, hidden: Floats | None) -> Floats:
        if hidden is None:
            return self.embedding.rows(layout.tokens)
        x = np.zeros((len(layout.tokens), self.config.width), np.float32)
        x[layout.real] = hidden
        return x

    def block(self, x: Floats, index: int, layer: Layer, plan: Plan, turns: NDArray[np.complex64]) -> None:
        """x += attention(norm(x)); x += ffn(norm(x)), which may be experts, too. ``x`` [layout rows, width], in place."""
        ops, eps = self.ops, self.config.eps
        queries = self.write_cells(x, index, layer, plan, turns)
        x += ops.linear(ops.attention(queries, index, plan), layer.attn_output, plan)
        normed = ops.rms_norm(x, layer.ffn_norm, eps)
        if layer.routed is not None:
            x += ops.routed(normed, layer.routed, plan)
        if layer.dense is not None:
            x += ops.linear(ops.swiglu(ops.linear(normed, layer.dense.gate_up, plan)), layer.dense.down, plan)

    def write_cells(self, x: Floats, index: int, layer: Layer, plan: Plan, turns: NDArray[np.complex64]) -> Floats:
        """Keys and values of ``x`` [layout rows, width] to the cache; returns the queries [layout rows, heads, head_dim]."""
        config, ops, layout = self.config, self.ops, plan.layout
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        joined = ops.linear(ops.rms_norm(x, layer.attn_norm, config.eps), layer.qkv, plan).reshape(len(x), heads + 2 * kv_heads, dim)
        turned = joined[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            turned[:] = ops.rms_norm(turned, layer.qk_norm, config.eps)
        ops.rope(turned, turns)
        written = joined[layout.real, heads:] if layout.padded else joined[:, heads:]
        self.kv.write(index, layout.pages, layout.offsets, written.reshape(-1, 2, kv_heads, dim))
        return joined[:, :heads]

    def copy_out(self, pages: Tokens) -> tuple[NDArray, ...]:
        """A host image of whole pages of this stage's layers."""
        return self.kv.copy_out(pages)

    def copy_in(self, image: tuple[NDArray, ...], pages: Tokens) -> None:
        """Write an image back, to these pages."""
        self.kv.copy_in(image, pages)


class Embedding:
    """Rows of the embedding, from the output matrix where the model ties them, else decoded from the file as needed."""

    def __init__(self, tensor: Tensor, tied: Matrix | None) -> None:
        self.tied = tied
        self.tensor = tensor
        self.stored = self.tensor.data.reshape(self.tensor.shape[0], -1)

    def rows(self, tokens: NDArray[np.int64]) -> Floats:
        """float32 [rows, width]."""
        if self.tied is not None:
            return self.tied.weights[tokens]
        return dequantize_blocks(self.tensor.type, self.stored[tokens]).reshape(len(tokens), -1)


class Weights:
    """Reads a model's tensors into the form that ``ops`` multiplies by."""

    def __init__(self, file: GGUFFile, config: ModelConfig, ops: NumpyOps) -> None:
        self.file, self.config, self.ops = file, config, ops

    def optional(self, name: str) -> Floats | None:
        tensor = self.file.tensors.get(name)
        return None if tensor is None else dequantize(tensor)

    def vector(self, name: str) -> Floats:
        return dequantize(self.file.tensors[name])

    def matrix(self, names: Sequence[str]) -> Matrix:
        """One matrix of several, with their biases (zero where only others have one)."""
        parts = [self._paired(name, self.vector(name)) for name in names]
        biases = [self.optional(name.replace(".weight", ".bias")) for name in names]
        if all(bias is None for bias in biases):
            return self.ops.matrix(parts)
        joined = [
            np.zeros(len(part), np.float32) if bias is None else self._paired(name, bias)
            for name, part, bias in zip(names, parts, biases, strict=True)
        ]
        return self.ops.matrix(parts, np.concatenate(joined))

    def _paired(self, name: str, rows: Floats) -> Floats:
        """q and k with their RoPE pairs interleaved."""
        part = name.split(".")[-2]
        return interleave(rows, self.config.head_dim, self.config.rope) if part in ("attn_q", "attn_k") else rows

    def layer(self, index: int) -> Layer:
        at = f"blk.{index}."
        return Layer(
            attn_norm=self.vector(at + "attn_norm.weight"),
            qkv=self.matrix([f"{at}attn_{which}.weight" for which in "qkv"]),
            qk_norm=self._qk_norm(at),
            attn_output=self.matrix([at + "attn_output.weight"]),
            ffn_norm=self.vector(f"{at}{self.config.family.ffn_norm}.weight"),
            dense=self._dense(at, index),
            routed=self._routed(at) if self.config.routed(index) else None,
        )

    def _dense(self, at: str, index: int) -> Dense | None:
        kind = "_shexp" if self.config.routed(index) else ""
        if f"{at}ffn_down{kind}.weight" not in self.file.tensors:
            return None
        gate_up = self.matrix([f"{at}ffn_gate{kind}.weight", f"{at}ffn_up{kind}.weight"])
        return Dense(gate_up, self.matrix([f"{at}ffn_down{kind}.weight"]))

    def _routed(self, at: str) -> Routed:
        assert self.config.experts is not None
        gate, up, down = (self.file.tensors[f"{at}ffn_{which}_exps.weight"] for which in ("gate", "up", "down"))
        return Routed(
            config=self.config.experts,
            router=self.matrix([at + "ffn_gate_inp.weight"]),
            bias=self.optional(at + "exp_probs_b.bias"),
            experts=self.ops.mixture.store.add(gate, up, down),
        )

    def _qk_norm(self, at: str) -> Floats | None:
        if f"{at}attn_q_norm.weight" not in self.file.tensors:
            return None
        heads = {"q": self.config.num_heads, "k": self.config.num_kv_heads}
        norms = [(self.vector(f"{at}attn_{which}_norm.weight"), count) for which, count in heads.items()]
        return np.concatenate([np.tile(interleave(norm, len(norm), self.config.rope), (count, 1)) for norm, count in norms])
