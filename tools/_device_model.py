"""A model of random weights for tools/device_check.py: the shape of an 8B model in IQ3_S, decoded through the engine's own stages.

One layer is made and recoded on the host; the others are copies of it in the device's memory, so that reading them costs what
reading a real model costs and loading takes seconds.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from strata.devices.base import Buffer, Device, Stream
from strata.engine.device_build import build_stage, load_weights
from strata.engine.device_sampling import DeviceSampler
from strata.engine.device_stage import DeviceStage, StageWeights, connect
from strata.engine.families import FAMILIES, ModelConfig
from strata.engine.kernel_weights import DeviceLayer, WeightLoader
from strata.engine.pipeline import Pipeline
from strata.engine.rope import Rope, RopeConfig
from strata.kernels.tensors import Matrix
from strata.messages import EngineFacts, EngineFailed, Segment, Window
from strata.request import Sampling
from strata.weights.formats import BY_NAME
from strata.weights.gguf import GGUFFile
from strata.weights.writer import StoredTensor
from tools._random_weights import random_blocks

PAGE_TOKENS = 64


@dataclass(frozen=True)
class ModelShape:
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def config(self, layers: int) -> ModelConfig:
        rope = RopeConfig(
            base=500_000.0, dims=self.head_dim, interleaved=True, scaling="none", factor=1.0, original_context=8192, magnitude=None,
            extrapolation=1.0, beta_fast=32.0, beta_slow=1.0,
        )  # fmt: skip
        return ModelConfig(
            family=FAMILIES["llama"], num_layers=layers, width=self.width, ffn_width=self.ffn, vocab_size=self.vocab,
            num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim, eps=1e-5, context=8192, rope=rope, tied=False,
        )  # fmt: skip


class RandomFile:
    """What a loader reads of a model file, for one layer: IQ3_S blocks with scales that keep activations near 1, norms of ones."""

    path = "random weights"

    def __init__(self, shape: ModelShape) -> None:
        q, kv, width, ffn = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.width, shape.ffn
        sizes = {
            "token_embd": (shape.vocab, width), "output": (shape.vocab, width), "blk.0.attn_q": (q, width), "blk.0.attn_k": (kv, width),
            "blk.0.attn_v": (kv, width), "blk.0.attn_output": (width, q), "blk.0.ffn_gate": (ffn, width), "blk.0.ffn_up": (ffn, width),
            "blk.0.ffn_down": (width, ffn),
        }  # fmt: skip
        self.tensors = {f"{name}.weight": random_blocks(*size) for name, size in sizes.items()}
        for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
            self.tensors[f"{name}.weight"] = StoredTensor(BY_NAME["F32"], (width,), np.ones(width, np.float32).view(np.uint8))


def random_weights(shape: ModelShape, layers: int, device: Device, stream: Stream, packed: bool) -> StageWeights:
    """The whole model on a device: each layer its own memory."""
    loader = WeightLoader(cast(GGUFFile, RandomFile(shape)), shape.config(1), device, stream, packed)
    one = load_weights(loader, shape.config(1), range(1))
    copies = [one.layers[0], *(copy_of_layer(device, one.layers[0], stream) for _ in range(layers - 1))]
    stream.synchronize()
    return replace(one, layers=tuple(copies))


def copy_of_layer(device: Device, layer: DeviceLayer, stream: Stream) -> DeviceLayer:
    def copy(buffer: Buffer) -> Buffer:
        target = device.allocate(buffer.shape, buffer.dtype)
        device.copy(target, buffer, stream)
        return target

    def copies(matrix: Matrix) -> Matrix:
        return replace(matrix, codes=copy(matrix.codes), scales=copy(matrix.scales), steps=copy(matrix.steps))

    assert layer.dense is not None
    dense = replace(layer.dense, gate_up=tuple(map(copies, layer.dense.gate_up)), down=copies(layer.dense.down))
    return replace(layer, qkv=tuple(map(copies, layer.qkv)), attn_output=copies(layer.attn_output), dense=dense)


def matrix_bytes(matrix: Matrix) -> int:
    return matrix.codes.nbytes + matrix.scales.nbytes + matrix.steps.nbytes


def bytes_per_window(weights: StageWeights) -> int:
    """Bytes of weights that a decode window reads: every matrix once, of the embedding a few rows."""
    matrices = [matrix for layer in weights.layers for matrix in layer.matrices]
    return sum(map(matrix_bytes, matrices)) + (matrix_bytes(weights.output[1]) if weights.output else 0)


def stages_of(shape: ModelShape, weights: StageWeights, cuts: Sequence[int], slots: int, device: Device) -> list[DeviceStage]:
    """Stages of one device that begin at layers 0 and ``cuts``, each with its own stream, pages and work space."""
    layers = len(weights.layers)
    config, edges, stages = shape.config(layers), [0, *cuts, layers], []
    facts = EngineFacts(
        num_pages=slots * 4, page_tokens=PAGE_TOKENS, context=4 * PAGE_TOKENS, page_bytes=1, chunk=PAGE_TOKENS, max_rows=slots,
        num_stages=len(edges) - 1,
    )  # fmt: skip
    for first, end in zip(edges, edges[1:]):
        part = StageWeights(
            weights.layers[first:end], weights.embedding if first == 0 else None, weights.output if end == layers else None
        )
        stages.append(build_stage(config, part, Rope(config.rope, None), facts, device, device.stream()))
    connect(stages)
    return stages


class Decoding:
    """Slots that decode greedily from one token each through a pipeline over ``stages``, in ``groups`` of equal size."""

    def __init__(self, stages: Sequence[DeviceStage], slots: int, groups: int = 1) -> None:
        named: list[tuple[str, Any]] = [(f"stage {number}", stage) for number, stage in enumerate(stages)]
        self._engine = Pipeline(named, stages[0]._facts, cast(Any, DeviceSampler(stages[-1].ops)))
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._engine.start(self._events.put)
        self._groups = [range(slot, slot + slots // groups) for slot in range(0, slots, slots // groups)]
        self.tokens = {slot: [5 + slot] for slot in range(slots)}

    def run(self, steps: int) -> float:
        """Seconds for each token of every slot."""
        started = time.perf_counter()
        for group in range(len(self._groups)):
            self._submit(group)
        for left in range(steps * len(self._groups) - 1, -1, -1):
            event = self._events.get(timeout=120)
            if isinstance(event, EngineFailed):
                raise RuntimeError(event.message)
            for slot, result in zip(self._groups[event.window_id], event.results):
                self.tokens[slot] += result.picks
            if left >= len(self._groups):
                self._submit(event.window_id)
        return (time.perf_counter() - started) / steps

    def _submit(self, group: int) -> None:
        segments = []
        for slot in self._groups[group]:
            history = self.tokens[slot]
            pages = tuple(range(4 * slot, 4 * slot + 4))
            segments.append(Segment(str(slot), slot, len(history) - 1, (history[-1],), pages, Sampling(temperature=0.0)))
        self._engine.submit(Window(group, "decode", group, tuple(segments)))

    def close(self) -> None:
        self._engine.close()
