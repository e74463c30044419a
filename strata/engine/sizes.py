"""How large the engine's parts are: pages of the KV pool, longest context, chunk. Pure: the free memory is an argument.

Rules. What cannot work is refused before the first weight is decoded, with the numbers and the setting to change. The KV pool takes what
every slot would need for a full context, at most half of the memory that the weights leave; its pages cost memory only once they
are used. A context that was not asked for shrinks to what the pool holds; one that was asked for is kept or refused.
"""

from __future__ import annotations

import logging
from typing import cast

from strata.config import Settings
from strata.engine.families import ModelConfig
from strata.engine.kv import PAGE_TOKENS, KVKind, page_bytes
from strata.engine.rows import GRID
from strata.errors import SettingError
from strata.messages import EngineFacts

log = logging.getLogger(__name__)

POOL_SHARE = 0.5
MIB = 1 << 20


def plan(settings: Settings, config: ModelConfig, free: int | None, num_stages: int) -> EngineFacts:
    """The engine's sizes. ``free``: bytes of memory for weights and KV, None if unknown. Raises SettingError."""
    kind = kv_kind(settings)
    page = page_bytes(config, config.num_layers, PAGE_TOKENS, kind)
    room = None if free is None else free - weight_bytes(config)
    if room is not None and room < page:
        raise SettingError(
            f"model: its weights need {weight_bytes(config) // MIB} MiB of memory as float32, and {(free or 0) // MIB} MiB are free; "
            "free some memory or take a smaller model"
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
    return EngineFacts(
        num_pages=pages, page_tokens=PAGE_TOKENS, context=context, page_bytes=page, prompt_grid=GRID,
        chunk=-(-settings.chunk // GRID) * GRID, max_rows=settings.batch, num_stages=num_stages,
    )


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
    """Float32 bytes of the matrices that layers ``span`` (default: all) keep in memory, with the last layer also the output matrix.

    An embedding that is not also the head stays in the file.
    """
    span = span or range(config.num_layers)
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = config.width * (heads + config.num_heads) * config.head_dim + 3 * config.width * config.ffn_width
    return 4 * (len(span) * layer + (config.vocab_size * config.width if span.stop == config.num_layers else 0))


def stage_line(number: int, span: range, threads: int, config: ModelConfig, facts: EngineFacts, kind: KVKind) -> str:
    """A stage's part of the plan, for people."""
    weights = weight_bytes(config, span)
    pages = facts.num_pages * page_bytes(config, len(span), facts.page_tokens, kind)
    return (
        f"stage {number} (cpu, {threads} {'thread' if threads == 1 else 'threads'}, layers {span.start} to {span.stop - 1}): "
        f"weights {weights / 1e6:.0f} MB as float32, {facts.num_pages} pages of {kind} {pages / 1e6:.0f} MB, used as needed"
    )
