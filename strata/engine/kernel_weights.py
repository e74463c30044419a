"""A stage's weights on a device: every tensor recoded once, joined where one launch can serve several.

Neighbours among q, k, v become one matrix where their layouts agree; gate and up then have their rows in turn. What does not
agree stays apart, for the kernels that take several (kernels/parts.py). q and k rows are reordered so that RoPE pairs are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from strata.devices.base import Buffer, Device, Stream
from strata.engine.families import ModelConfig
from strata.engine.rope import interleave
from strata.kernels.store_heads import HeadNorms
from strata.kernels.tensors import Matrix, put_grid, put_matrix
from strata.weights.formats import dequantize
from strata.weights.gguf import GGUFFile
from strata.weights.layouts import ODD4, PACKED3, Layout, Recoded
from strata.weights.recode import interleave as rows_in_turn
from strata.weights.recode import join, layouts_for, recode

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One block. ``qkv``: matrices whose rows follow each other. ``gate_up``: one matrix with rows in turn, or gate and up."""

    attn_norm: Buffer
    qkv: tuple[Matrix, ...]
    norms: HeadNorms | None
    attn_output: Matrix
    ffn_norm: Buffer
    gate_up: tuple[Matrix, ...]
    down: Matrix

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (*self.qkv, self.attn_output, *self.gate_up, self.down)


Part = tuple[Recoded, Floats | None]
"""A tensor with its bias."""


def has_bias(parts: Sequence[Part]) -> bool:
    return any(bias is not None for _, bias in parts)


def filled_biases(parts: Sequence[Part]) -> list[Floats]:
    """Their biases, zeros for those without."""
    return [np.zeros(part.rows, np.float32) if bias is None else bias for part, bias in parts]


class WeightLoader:
    """Takes tensors from ``file`` to ``device``. ``packed``: keep IQ3_S at its 3.44 bits instead of 4.31, where memory is short."""

    def __init__(self, file: GGUFFile, config: ModelConfig, device: Device, stream: Stream, packed: bool = False) -> None:
        self._file, self._config, self._device, self._stream = file, config, device, stream
        self._preferred = PACKED3 if packed else ODD4
        self._grid = put_grid(device, stream)

    def vector(self, values: Floats) -> Buffer:
        buffer = self._device.allocate(values.shape, np.float32)
        self._device.upload(buffer, np.ascontiguousarray(values), self._stream)
        self._stream.synchronize()
        return buffer

    def norm(self, name: str) -> Buffer:
        return self.vector(dequantize(self._file.tensors[name]))

    def optional(self, name: str) -> Floats | None:
        tensor = self._file.tensors.get(name)
        return None if tensor is None else dequantize(tensor)

    def matrix(self, name: str) -> Matrix:
        return self._put(self.recoded(name), self._bias(name))

    def _layout(self, name: str) -> Layout:
        layouts = layouts_for(self._file.tensors[name].type)
        return self._preferred if self._preferred in layouts else layouts[0]

    def recoded(self, name: str) -> Recoded:
        """A tensor in its layout, q and k rows with their RoPE pairs next to each other."""
        tensor = self._file.tensors[name]
        rows, columns = tensor.shape
        stored = recode(tensor.type, tensor.data, rows, columns, self._layout(name))
        if not self._turns(name) or self._config.rope.interleaved:
            return stored
        order = self._paired(np.arange(rows))
        return Recoded(stored.layout, columns, stored.codes[order], stored.scales[order], stored.steps[order], stored.unit)

    @staticmethod
    def _turns(name: str) -> bool:
        return name.split(".")[-2] in ("attn_q", "attn_k")

    def _paired(self, values: NDArray) -> NDArray:
        return interleave(values, self._config.head_dim, self._config.rope)

    def _bias(self, name: str) -> Floats | None:
        bias = self.optional(name.replace(".weight", ".bias"))
        return self._paired(bias) if bias is not None and self._turns(name) else bias

    def _put(self, tensor: Recoded, bias: Floats | None) -> Matrix:
        return put_matrix(self._device, tensor, self._grid, self._stream, bias)

    def joined(self, names: Sequence[str]) -> tuple[Matrix, ...]:
        """The tensors' rows one after the other, neighbours of one layout in one matrix."""
        parts = [(self.recoded(name), self._bias(name)) for name in names]
        groups = [list(group) for _, group in groupby(parts, lambda part: (part[0].layout, part[0].unit))]
        biases = [np.concatenate(filled_biases(group)) if has_bias(group) else None for group in groups]
        return tuple(self._put(join([part for part, _ in group]), bias) for group, bias in zip(groups, biases))

    def in_turn(self, first: str, second: str) -> tuple[Matrix, ...]:
        """The rows of both in turn, or one matrix each where their layouts differ."""
        parts = [(self.recoded(name), self._bias(name)) for name in (first, second)]
        (one, _), (other, _) = parts
        if (one.layout, one.unit) != (other.layout, other.unit):
            return tuple(self._put(part, bias) for part, bias in parts)
        return (self._put(rows_in_turn(one, other), np.stack(filled_biases(parts), axis=1).reshape(-1) if has_bias(parts) else None),)

    def layer(self, index: int) -> DeviceLayer:
        at = f"blk.{index}."
        return DeviceLayer(
            attn_norm=self.norm(at + "attn_norm.weight"),
            qkv=self.joined([f"{at}attn_{which}.weight" for which in "qkv"]),
            norms=self._head_norms(at),
            attn_output=self.matrix(at + "attn_output.weight"),
            ffn_norm=self.norm(at + "ffn_norm.weight"),
            gate_up=self.in_turn(at + "ffn_gate.weight", at + "ffn_up.weight"),
            down=self.matrix(at + "ffn_down.weight"),
        )

    def _head_norms(self, at: str) -> HeadNorms | None:
        q, k = (self.optional(f"{at}attn_{which}_norm.weight") for which in "qk")
        if q is None or k is None:
            return None
        return HeadNorms(self.vector(self._paired(q)), self.vector(self._paired(k)), self._config.eps)
