"""A stage on a device from a model file: weights taken, memory allocated, kernels compiled."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from strata.devices.base import Device, Stream
from strata.engine.device_bytes import check_model
from strata.engine.device_chain import ChainRunner
from strata.engine.device_draft import DeviceMtp
from strata.engine.device_space import DraftSizes, DraftSpace, Workspace, window_sizes
from strata.engine.device_stage import DeviceStage, StageWeights
from strata.engine.draft_ops import DraftOps, DraftWeights, draft_kernels_of
from strata.engine.draft_upload import DraftSender
from strata.engine.families import ModelConfig
from strata.engine.graphs import ROW_BUCKETS
from strata.engine.kernel_ops import KernelOps, kernels_of
from strata.engine.kernel_weights import WeightLoader
from strata.engine.mtp_file import Heads
from strata.engine.rope import Rope
from strata.kernels.draft import clear
from strata.kernels.pages import Pages, PageShape
from strata.kernels.sample import LOGPROBS, PICK
from strata.messages import EngineFacts
from strata.weights.gguf import GGUFFile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageSource:
    """What stages are made of: ``packed`` as for WeightLoader, ``kv`` as PageShape.kind."""

    file: GGUFFile
    config: ModelConfig
    facts: EngineFacts
    packed: bool = False
    kv: str = "int8"


@dataclass(frozen=True, slots=True)
class Drafting:
    """What drafts behind the last stage."""

    heads: Heads
    sizes: DraftSizes


def load_device_stage(device: Device, source: StageSource, span: range, drafting: Drafting | None = None) -> DeviceStage:
    """Layers ``span`` of a model on ``device``, its kernels compiled.

    Raises DeviceError for what does not fit or compile, ModelError for what the kernels cannot hold.
    """
    check_model(source.file, source.config)
    stream = device.stream()
    loader = WeightLoader(source.file, source.config, device, stream, source.packed)
    rope = Rope(source.config.rope, loader.optional("rope_freqs.weight"))
    weights = load_weights(loader, source.config, span)
    stage = build_stage(source.config, weights, rope, source.facts, device, stream, source.kv, more_layers=0 if drafting is None else 1)
    if drafting is not None:
        own = WeightLoader(drafting.heads.file, drafting.heads.config, device, stream, source.packed, loader.grid)
        add_drafts(stage, load_draft(loader, own, drafting.heads, weights), drafting, rope, source.facts)
    return stage


def build_stage(
    config: ModelConfig, weights: StageWeights, rope: Rope, facts: EngineFacts, device: Device, stream: Stream, kv: str = "int8",
    more_layers: int = 0,
) -> DeviceStage:  # fmt: skip
    """A stage around weights that are on ``device``: its pages (with room for ``more_layers``), its work space, its kernels compiled."""
    shape = PageShape(len(weights.layers) + more_layers, config.num_kv_heads, config.head_dim, facts.page_tokens, kv)
    pages = Pages(shape, device.allocate((facts.num_pages + 1, shape.page_bytes), np.int8))
    space = Workspace(device, config, shape, window_sizes(facts.chunk, facts.max_rows, facts.context), stream, weights.output is not None)
    ends = [matrix for matrix in (weights.embedding, weights.output[1] if weights.output else None) if matrix is not None]
    kernels = list(kernels_of(config, shape, weights.layers, ends, every_count(facts)))
    seconds = device.compile(kernels + ([PICK, LOGPROBS] if weights.output is not None else []))
    log.info("kernels for %s: %.1f s to compile, or to find in the cache", device.info.name, seconds)
    return DeviceStage(KernelOps(device, config, pages, space, stream), weights, rope, facts)


def every_count(facts: EngineFacts) -> range:
    """The rows that a window can have: what is left of a prompt is of any size, and no request should wait for a compiler."""
    return range(1, max(ROW_BUCKETS[-1], facts.chunk) + 1)


def add_drafts(stage: DeviceStage, weights: DraftWeights, drafting: Drafting, rope: Rope, facts: EngineFacts) -> None:
    """A head behind ``stage``, whose pages have room for one more layer."""
    ops, sizes, index = stage.ops, drafting.sizes, len(stage.weights.layers)
    ops.device.compile(list(draft_kernels_of(ops.config, ops.pages.shape, weights, every_count(facts))))
    space = DraftSpace(ops.device, ops.config, sizes, ops.stream)
    layer_bytes = ops.pages.shape.layer_bytes
    clear(ops.device, ops.pages.data, index * layer_bytes, layer_bytes, ops.stream)
    sender = DraftSender(ops.device, ops.stream, sizes, rope, ops.space.every, scratch_page=facts.num_pages)
    runner = ChainRunner(DraftOps(ops, weights, space, index), sender, drafting.heads.ascending, facts.context)
    stage.mtp = DeviceMtp(runner, sender, facts)
    ops.kept = space.store.rows(0, sizes.rows)
    stage.page_hidden = space.store.rows(space.pages_at, space.pages_at + sizes.pages)
    if len(drafting.heads.config.mtp_blocks) > 1:
        log.warning("%s: of %d heads the first drafts, on a device", drafting.heads.file.path, len(drafting.heads.config.mtp_blocks))


def load_weights(loader: WeightLoader, config: ModelConfig, span: range) -> StageWeights:
    """The weights of layers ``span``, with the ends of the model where the span has them. A tied matrix is taken once."""
    is_first, is_last = span.start == 0, span.stop == config.num_layers
    embedding = loader.matrix("token_embd.weight") if is_first or (is_last and config.tied) else None
    output = None
    if is_last:
        head = embedding if config.tied and embedding is not None else loader.matrix("output.weight")
        output = (loader.norm("output_norm.weight"), head)
    return StageWeights(tuple(loader.layer(index) for index in span), embedding if is_first else None, output)


def load_draft(model: WeightLoader, own: WeightLoader, heads: Heads, weights: StageWeights) -> DraftWeights:
    """The first head; what its file lacks is the trunk's, whose ``weights`` end on the same stage."""
    block, config = heads.config.mtp_blocks[0], heads.config
    at, tied = f"blk.{block}.nextn.", config.tied
    assert weights.output is not None
    norm, output = weights.output
    if own.has(at + "shared_head_head.weight"):
        owner, name = own, at + "shared_head_head.weight"
    else:
        owner, name = model, "token_embd.weight" if tied else "output.weight"
    some = heads.ascending
    if some is not None:
        output = owner.some_rows(name, some)
    elif owner is own:
        output = own.matrix(name)
    embedding = weights.embedding or (weights.output[1] if tied else None)
    if own.has(at + "embed_tokens.weight"):
        embedding = own.matrix(at + "embed_tokens.weight")
    ids = np.arange(config.vocab_size) if some is None else some
    return DraftWeights(
        layer=own.layer(block),
        norms=(own.norm(at + "enorm.weight"), own.norm(at + "hnorm.weight")),
        eh_proj=own.matrix(at + "eh_proj.weight"),
        norm=own.norm(at + "shared_head_norm.weight") if own.has(at + "shared_head_norm.weight") else norm,
        output=output,
        embedding=model.matrix("token_embd.weight") if embedding is None else embedding,
        vocabulary=own.vector(ids.astype(np.int32)),
    )
