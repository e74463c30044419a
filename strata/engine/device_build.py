"""A stage on a device from a model file: weights taken, memory allocated, kernels compiled."""

from __future__ import annotations

import logging

from strata.devices.base import Device, Stream
from strata.engine.device_plan import check_model
from strata.engine.device_space import Workspace, window_sizes
from strata.engine.device_stage import DeviceStage, StageWeights
from strata.engine.families import ModelConfig
from strata.engine.graphs import row_buckets
from strata.engine.kernel_ops import KernelOps, kernels_of
from strata.engine.kernel_weights import WeightLoader
from strata.engine.rope import Rope
from strata.kernels.pages import Pages, PageShape
from strata.messages import EngineFacts
from strata.weights.gguf import GGUFFile

log = logging.getLogger(__name__)


def load_device_stage(
    device: Device, file: GGUFFile, config: ModelConfig, span: range, facts: EngineFacts, packed: bool = False, kv: str = "int8"
) -> DeviceStage:
    """Layers ``span`` of a model on ``device``, its kernels compiled; ``packed`` as for WeightLoader, ``kv`` as PageShape.kind.

    Raises DeviceError for what does not fit or compile, ModelError for what the kernels cannot hold.
    """
    check_model(file, config)
    stream = device.stream()
    loader = WeightLoader(file, config, device, stream, packed)
    rope = Rope(config.rope, loader.optional("rope_freqs.weight"))
    return build_stage(config, load_weights(loader, config, span), rope, facts, device, stream, kv)


def build_stage(
    config: ModelConfig, weights: StageWeights, rope: Rope, facts: EngineFacts, device: Device, stream: Stream, kv: str = "int8"
) -> DeviceStage:
    """A stage around weights that are on ``device``: its pages, its work space, its kernels compiled."""
    shape = PageShape(len(weights.layers), config.num_kv_heads, config.head_dim, facts.page_tokens, kv)
    pages = Pages(shape, device.allocate((facts.num_pages + 1, shape.page_bytes), "i1"))
    space = Workspace(device, config, shape, window_sizes(facts.chunk, facts.max_rows, facts.context), stream, weights.output is not None)
    ends = [matrix for matrix in (weights.embedding, weights.output[1] if weights.output else None) if matrix is not None]
    counts = sorted({*row_buckets(facts.max_rows), facts.chunk})
    seconds = device.compile(list(kernels_of(config, shape, weights.layers, ends, counts)))
    log.info("kernels for %s: %.1f s to compile, or to find in the cache", device.info.name, seconds)
    return DeviceStage(KernelOps(device, config, pages, space, stream), weights, rope, facts)


def load_weights(loader: WeightLoader, config: ModelConfig, span: range) -> StageWeights:
    """The weights of layers ``span``, with the ends of the model where the span has them. A tied matrix is taken once."""
    is_first, is_last = span.start == 0, span.stop == config.num_layers
    embedding = loader.matrix("token_embd.weight") if is_first or (is_last and config.tied) else None
    output = None
    if is_last:
        head = embedding if config.tied and embedding is not None else loader.matrix("output.weight")
        output = (loader.norm("output_norm.weight"), head)
    return StageWeights(tuple(loader.layer(index) for index in span), embedding if is_first else None, output)
