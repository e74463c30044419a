"""How large the engine's parts are: pages of the KV pool, longest context, chunk. Pure: the free memory is an argument.

Rules. What cannot work is refused before the first weight is decoded, with the numbers and the setting to change. The KV pool takes what
every slot would need for a full context, at most half of the memory that the weights leave; its pages cost memory only once they
are used. A context that was not asked for shrinks to what the pool holds; one that was asked for is kept or refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from strata.config import Settings
from strata.engine.draft_load import draft_facts
from strata.engine.expert_sizes import ExpertRoom, expert_bytes, expert_room
from strata.engine.families import ModelConfig
from strata.engine.kv import PAGE_TOKENS, KVKind, page_bytes
from strata.engine.mtp_file import Heads, num_heads
from strata.engine.rows import GRID
from strata.engine.stage import StageMemory
from strata.errors import SettingError
from strata.messages import EngineFacts

log = logging.getLogger(__name__)

POOL_SHARE = 0.5
TILES_WORK = 2 << 20  # attention copies a MiB of keys for each thread
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Layers ``span`` and the ``heads`` behind them, in bytes: ``weights`` without the ``experts`` that rows are routed to, ``kv``, and
    about what is needed to ``work``."""

    span: range
    heads: Heads | None
    weights: int
    kv: int
    experts: ExpertRoom
    work: int

    @property
    def memory(self) -> StageMemory:
        return StageMemory("cpu", self.weights + self.experts.held, self.kv, self.work)


def plan(settings: Settings, config: ModelConfig, free: int | None, num_stages: int, heads: Heads | None = None) -> EngineFacts:
    """The engine's sizes. ``free``: bytes of memory for weights and KV, None if unknown; ``heads`` that draft. Raises SettingError."""
    kind = kv_kind(settings)
    page = page_bytes(config, config.num_layers, PAGE_TOKENS, kind) + head_page_bytes(heads, PAGE_TOKENS, kind)
    experts = planned_experts(settings, config, free, heads)
    room = None if free is None else free - fixed_bytes(config, heads) - experts.held
    if room is not None and room < page:
        raise SettingError(
            f"model: its weights need {(fixed_bytes(config, heads) + experts.held) // MIB} MiB of memory as float32, and "
            f"{(free or 0) // MIB} MiB are free; free some memory or take a smaller model"
        )
    context = settings.context or config.context
    if context > config.context:
        log.warning("context %d is beyond the %d that the model was trained for; answers may degrade", context, config.context)
    pages = pool_pages(settings, room, page, -(-context // PAGE_TOKENS))
    if pages * PAGE_TOKENS < context:
        if settings.context is not None:
            smaller = "" if kind == "int8" else ", or take --kv int8"
            raise SettingError(
                f"context: {context} tokens need {-(-context // PAGE_TOKENS) * page // MIB + 1} MiB for keys and values, and "
                f"{pages * page // MIB} MiB are planned; lower --context or raise --kv-memory-mib{smaller}"
            )
        log.warning("context is %d tokens instead of %d: the memory for keys and values holds no more", pages * PAGE_TOKENS, context)
        context = pages * PAGE_TOKENS
    facts = EngineFacts(
        num_pages=pages, page_tokens=PAGE_TOKENS, context=context, page_bytes=page, prompt_grid=GRID,
        chunk=-(-settings.chunk // GRID) * GRID, max_rows=settings.batch, num_stages=num_stages,
    )
    return draft_facts(settings, config, facts, heads)


def pool_pages(settings: Settings, room: int | None, page: int, pages_of_context: int) -> int:
    """Pages of the KV pool: what ``kv_memory_mib`` says, else a full context for every slot as far as ``room`` bytes allow."""
    if settings.kv_memory_mib is not None:
        pages = settings.kv_memory_mib * MIB // page
        if room is not None and pages * page > room or not pages:
            raise SettingError(
                f"kv_memory_mib: {settings.kv_memory_mib} MiB; one page of {PAGE_TOKENS} tokens needs {page // MIB + 1} MiB"
                + ("" if room is None else f", and {room // MIB} MiB are free beside the weights")
            )
        return pages
    wanted = settings.batch * pages_of_context
    return wanted if room is None else min(wanted, max(1, int(room * POOL_SHARE) // page))


def kv_kind(settings: Settings) -> KVKind:
    """How the CPU keeps keys and values. Raises SettingError for what only a device keeps."""
    if settings.kv == "f16":
        raise SettingError("kv: f16 is kept on GPUs; the CPU keeps f32 or int8")
    return cast(KVKind, settings.kv or "f32")


def weight_bytes(config: ModelConfig, span: range | None = None) -> int:
    """Float32 bytes of the matrices that layers ``span`` (default: all) keep in memory, with the last layer also the output matrix;
    without the experts that rows are routed to (expert_sizes.py).

    An embedding that is not also the head stays in the file.
    """
    span = span or range(config.num_layers)
    heads, experts = config.num_heads + 2 * config.num_kv_heads, config.experts
    rows = config.vocab_size if span.stop == config.num_layers else 0
    for layer in span:
        rows += (heads + config.num_heads) * config.head_dim
        rows += experts.count + 3 * experts.shared_width if experts and config.routed(layer) else 3 * config.ffn_width
    return 4 * config.width * rows


def head_bytes(heads: Heads | None) -> int:
    """Of the heads' weights but their experts."""
    return heads.weight_bytes - expert_bytes(heads.config, heads.config.mtp_blocks) if heads else 0


def fixed_bytes(config: ModelConfig, heads: Heads | None) -> int:
    """Of all weights but the experts that rows are routed to."""
    return weight_bytes(config) + head_bytes(heads)


def planned_experts(settings: Settings, config: ModelConfig, free: int | None, heads: Heads | None) -> ExpertRoom:
    """Room for decoded experts of the trunk and of ``heads``. Raises SettingError."""
    blocks = [*range(config.num_layers), *(heads.config.mtp_blocks if heads else ())]
    return expert_room(settings, config, blocks, None if free is None else free - fixed_bytes(config, heads))


def head_page_bytes(heads: Heads | None, page_tokens: int, kind: KVKind) -> int:
    """Bytes of a page for the heads: one more layer for each, and a hidden state."""
    if heads is None:
        return 0
    return page_bytes(heads.config, num_heads(heads), page_tokens, kind) + 4 * heads.config.width


def stage_plans(
    settings: Settings, config: ModelConfig, spans: Sequence[range], facts: EngineFacts, heads: Heads | None, free: int | None
) -> list[StagePlan]:
    """What each stage takes, the last one with all heads. Arguments as ``plan``, which gave ``facts``. Raises SettingError."""
    kind, experts, plans = kv_kind(settings), planned_experts(settings, config, free, heads), []
    for span in spans:
        own = heads if span.stop == config.num_layers else None
        page = page_bytes(config, len(span), facts.page_tokens, kind) + head_page_bytes(own, facts.page_tokens, kind)
        blocks = [*span, *(own.config.mtp_blocks if own else ())]
        weights = weight_bytes(config, span) + head_bytes(own)
        room, work = experts.share(expert_bytes(config, blocks)), work_bytes(config, span, facts)
        plans.append(StagePlan(span, own, weights, facts.num_pages * page, room, work))
    return plans


def work_bytes(config: ModelConfig, span: range, facts: EngineFacts) -> int:
    """About what a stage's NumPy calls hold at once: a chunk's rows between two products, tiles for attention, on the last stage logits.

    An estimate, for people: measured within a third.
    """
    experts, heads = config.experts, 2 * (config.num_heads + config.num_kv_heads)
    inner = max(config.ffn_width, experts.used * experts.width + experts.shared_width if experts else 0)
    rows = facts.chunk * (4 * config.width + heads * config.head_dim + 3 * inner)
    return TILES_WORK + 4 * (rows + (facts.max_rows * config.vocab_size if span.stop == config.num_layers else 0))


def stage_line(number: int, stage: StagePlan, threads: int, facts: EngineFacts, kind: KVKind) -> str:
    """A stage's part of the plan, for people."""
    experts = stage.experts
    kept = f" with {experts.held / 1e6:.0f} of {experts.every / 1e6:.0f} MB of experts, decoded when used"
    kept = "" if experts.limit is None else kept
    return (
        f"stage {number} (cpu, {threads} {'thread' if threads == 1 else 'threads'}, layers {stage.span.start} to {stage.span.stop - 1}"
        f"{' and a head that drafts' if stage.heads else ''}): "
        f"weights {stage.memory.weights / 1e6:.0f} MB as float32{kept}, work space about {stage.work / 1e6:.0f} MB, "
        f"{facts.num_pages} pages of {kind} {stage.kv / 1e6:.0f} MB, used as needed"
    )
