"""The frozen model in torch: the next token of many texts at a time, which is all that writing text and judging a head need.

Weights are dequantised once. In bfloat16 (``torch.bfloat16``; fast where the processor multiplies it, AMX or AVX512-BF16) only the
products and the cells are rounded: the residual stream and the norms stay in float32. All rows are at the same position: a pass then
reads only the cells that are filled, and reading cells is most of its time. q and k rows are in halves (see export.halved_rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from strata.weights.formats import dequantize
from strata.weights.gguf import GGUFFile
from tools.train_mtp.export import halved_rows, heads_of

LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True)
class Sizes:
    """What a block needs to know of the model it belongs to."""

    width: int
    heads: int
    kv_heads: int
    eps: float
    base: float

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class Trunk:
    """The model at ``path`` with its products in ``dtype``. ``layers[i]`` has the tensors of LAYER, float32."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        file = GGUFFile.open(path)
        meta = file.metadata
        self.sizes = Sizes(
            width=int(meta["llama.embedding_length"]),  # type: ignore[call-overload]
            heads=int(meta["llama.attention.head_count"]),  # type: ignore[call-overload]
            kv_heads=int(meta["llama.attention.head_count_kv"]),  # type: ignore[call-overload]
            eps=float(meta["llama.attention.layer_norm_rms_epsilon"]),  # type: ignore[arg-type]
            base=float(meta["llama.rope.freq_base"]),  # type: ignore[arg-type]
        )
        self.dtype, self.turned = dtype, heads_of(file)
        count = int(meta["llama.block_count"])  # type: ignore[call-overload]
        self.layers = [{name: self._read(file, f"blk.{layer}.{name}") for name in LAYER} for layer in range(count)]
        self.output_norm = self._read(file, "output_norm")
        self.embedding = self._read(file, "token_embd")
        file.close()
        self.head = self.embedding.to(dtype)
        self.products = [self._fused(layer) for layer in self.layers]

    def _read(self, file: GGUFFile, name: str) -> Tensor:
        values = dequantize(file.tensors[f"{name}.weight"])
        part = name.rpartition(".")[2]
        return torch.from_numpy(halved_rows(values, self.turned[part]).copy() if part in self.turned else values)

    def _fused(self, layer: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fewer, larger products: q, k, v as one matrix and gate, up as one."""
        qkv = torch.cat([layer["attn_q"], layer["attn_k"], layer["attn_v"]])
        gate_up = torch.cat([layer["ffn_gate"], layer["ffn_up"]])
        first, second, third, fourth = (matrix.to(self.dtype) for matrix in (qkv, layer["attn_output"], gate_up, layer["ffn_down"]))
        return first, second, third, fourth

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab] of hidden states after the output norm [rows, width]."""
        return linear(hidden.to(self.dtype), self.head).float()


class Rows:
    """The cells of ``count`` texts of at most ``length`` tokens, and the pass over the next token of each."""

    def __init__(self, trunk: Trunk, count: int, length: int) -> None:
        self.trunk, self.count, self.length = trunk, count, length
        sizes = trunk.sizes
        shape = (len(trunk.layers), count, sizes.kv_heads, length, sizes.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=trunk.dtype), torch.zeros(shape, dtype=trunk.dtype)
        self.turns = turns(sizes, length)
        self.last_input: Tensor | None = None

    @torch.inference_mode()
    def step(self, tokens: Tensor, position: int) -> Tensor:
        """Hidden states after the output norm, float32 [count, width], of ``tokens`` (int64 [count]), all at ``position``.

        Cells from ``position`` on are not read, so going back to 0 begins new texts. Also keeps what went into the last layer,
        ``last_input`` (the same shape).
        """
        trunk, eps, width = self.trunk, self.trunk.sizes.eps, (self.trunk.sizes.width,)
        x = trunk.embedding[tokens]
        for index, (layer, (qkv, output, gate_up, down)) in enumerate(zip(trunk.layers, trunk.products, strict=True)):
            self.last_input = x
            mixed = self._attend(index, linear(rms_norm(x, width, layer["attn_norm"], eps).to(trunk.dtype), qkv).float(), position)
            x = x + linear(mixed.to(trunk.dtype), output)
            gate, up = linear(rms_norm(x, width, layer["ffn_norm"], eps).to(trunk.dtype), gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, down)
        return rms_norm(x, width, trunk.output_norm, eps)

    def _attend(self, index: int, qkv: Tensor, position: int) -> Tensor:
        """[count, heads * head_dim]: each row's query over its own cells up to ``position``. Stores the new cell."""
        sizes, kv = self.trunk.sizes, self.trunk.sizes.kv_heads
        turn = (self.turns[0][position], self.turns[1][position])
        q, k, v = qkv.view(self.count, -1, sizes.head_dim).split([sizes.heads, kv, kv], dim=1)
        keys, values = self.keys[index], self.values[index]
        keys[:, :, position], values[:, :, position] = rotate(k, *turn).to(keys.dtype), v.to(values.dtype)
        # The queries that share a KV head go as so many positions of one head, so that its cells are read once.
        grouped = rotate(q, *turn).to(keys.dtype).view(self.count, kv, -1, sizes.head_dim)
        mixed = scaled_dot_product_attention(grouped, keys[:, :, : position + 1], values[:, :, : position + 1])
        return mixed.reshape(self.count, -1)


def turns(sizes: Sizes, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the RoPE angles, float32 [length, head_dim / 2] each."""
    rates = sizes.base ** (-torch.arange(0, sizes.head_dim, 2, dtype=torch.float64) / sizes.head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on pairs (i, i + dims/2) of the last axis; ``cos`` and ``sin`` broadcast over the others."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
