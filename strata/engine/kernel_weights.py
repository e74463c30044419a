"""A stage's weights on a device: every tensor recoded once, joined where one launch can serve several.

Neighbours among q, k, v become one matrix where their layouts agree; gate and up then have their rows in turn. What does not
agree stays apart, for the kernels that take several (kernels/parts.py). q and k rows are reordered so that RoPE pairs are neighbours.
The experts of a block are one matrix each for gate, up and down, one expert below the other; the router keeps its float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from strata.devices.base import Buffer, Device, Stream
from strata.engine.families import ModelConfig
from strata.engine.rope import interleave
from strata.kernels.experts import Experts
from strata.kernels.route import Router
from strata.kernels.store_heads import HeadNorms
from strata.kernels.tensors import Matrix, put_grid, put_matrix
from strata.weights.formats import dequantize
from strata.weights.gguf import GGUFFile
from strata.weights.layouts import ODD4, PACKED3, Layout, Recoded
from strata.weights.recode import interleave as rows_in_turn
from strata.weights.recode import join, layouts_for, recode

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DeviceDense:
    """A network that every row goes through. ``gate_up``: one matrix with rows in turn, or gate and up."""

    gate_up: tuple[Matrix, ...]
    down: Matrix


@dataclass(frozen=True, slots=True)
class DeviceRouted:
    """Experts, and what sends rows to them."""

    router: Router
    gate: Experts
    up: Experts
    down: Experts

    @property
    def layouts(self) -> tuple[str, str, str]:
        return self.gate.matrix.layout, self.up.matrix.layout, self.down.matrix.layout


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One block. ``qkv``: matrices whose rows follow each other. ``dense``: the block's network, or the expert that all rows share;
    ``routed``: its experts; a block has one of them or both."""

    attn_norm: Buffer
    qkv: tuple[Matrix, ...]
    norms: HeadNorms | None
    attn_output: Matrix
    ffn_norm: Buffer
    dense: DeviceDense | None
    routed: DeviceRouted | None

    @property
    def matrices(self) -> Iterator[Matrix]:
        yield from (*self.qkv, self.attn_output)
        if self.dense is not None:
            yield from (*self.dense.gate_up, self.dense.down)
        if self.routed is not None:
            yield from (self.routed.gate.matrix, self.routed.up.matrix, self.routed.down.matrix)


Part = tuple[Recoded, Floats | None]
"""A tensor with its bias."""


def has_bias(parts: Sequence[Part]) -> bool:
    return any(bias is not None for _, bias in parts)


def filled_biases(parts: Sequence[Part]) -> list[Floats]:
    """Their biases, zeros for those without."""
    return [np.zeros(part.rows, np.float32) if bias is None else bias for part, bias in parts]


class WeightLoader:
    """Takes tensors from ``file`` to ``device``. ``packed``: keep IQ3_S at its 3.44 bits instead of 4.31, where memory is short;
    ``grid``: its table, where the device has it."""

    def __init__(
        self, file: GGUFFile, config: ModelConfig, device: Device, stream: Stream, packed: bool = False, grid: Buffer | None = None
    ) -> None:
        self._file, self._config, self._device, self._stream = file, config, device, stream
        self._preferred = PACKED3 if packed else ODD4
        self.grid = put_grid(device, stream) if grid is None else grid

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def vector(self, values: NDArray) -> Buffer:
        """An array as it is."""
        buffer = self._device.allocate(values.shape, values.dtype)
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

    def some_rows(self, name: str, rows: NDArray[np.int64]) -> Matrix:
        """These rows of a tensor, in this order."""
        tensor = self._file.tensors[name]
        stored = np.ascontiguousarray(tensor.data.reshape(tensor.shape[0], -1)[rows]).reshape(-1)
        return self._put(recode(tensor.type, stored, len(rows), tensor.shape[1], self._layout(name)), None)

    def _layout(self, name: str) -> Layout:
        layouts = layouts_for(self._file.tensors[name].type)
        return self._preferred if self._preferred in layouts else layouts[0]

    def recoded(self, name: str) -> Recoded:
        """A tensor in its layout, all but its last axis as rows; q and k rows with their RoPE pairs next to each other."""
        tensor = self._file.tensors[name]
        *outer, columns = tensor.shape
        rows = math.prod(outer)
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
        return put_matrix(self._device, tensor, self.grid, self._stream, bias)

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
        """A block of the trunk, or one that drafts."""
        at, config = f"blk.{index}.", self._config
        routed = config.routed(index)
        has_dense = not routed or (config.experts is not None and config.experts.shared_width > 0)
        return DeviceLayer(
            attn_norm=self.norm(at + "attn_norm.weight"),
            qkv=self.joined([f"{at}attn_{which}.weight" for which in "qkv"]),
            norms=self._head_norms(at),
            attn_output=self.matrix(at + "attn_output.weight"),
            ffn_norm=self.norm(f"{at}{config.family.ffn_norm}.weight"),
            dense=self._dense(at, "_shexp" if routed else "") if has_dense else None,
            routed=self._routed(at) if routed else None,
        )

    def _dense(self, at: str, ending: str) -> DeviceDense:
        gate_up = self.in_turn(f"{at}ffn_gate{ending}.weight", f"{at}ffn_up{ending}.weight")
        return DeviceDense(gate_up, self.matrix(f"{at}ffn_down{ending}.weight"))

    def _routed(self, at: str) -> DeviceRouted:
        assert self._config.experts is not None
        count, bias = self._config.experts.count, self.optional(at + "exp_probs_b.bias")
        router = Router(self.norm(at + "ffn_gate_inp.weight"), None if bias is None else self.vector(bias))
        return DeviceRouted(router, *(Experts(count, self.matrix(f"{at}ffn_{which}_exps.weight")) for which in ("gate", "up", "down")))

    def _head_norms(self, at: str) -> HeadNorms | None:
        q, k = (self.optional(f"{at}attn_{which}_norm.weight") for which in "qk")
        if q is None or k is None:
            return None
        return HeadNorms(self.vector(self._paired(q)), self.vector(self._paired(k)), self._config.eps)
