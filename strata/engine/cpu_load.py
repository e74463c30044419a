"""From settings and an open model file to an engine on the CPU: the memory plan (sizes.py) first, weights then.

The embedding of a model whose head is another matrix stays in the file and is decoded row by row, so the file must stay open as long as
the engine runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, nullcontext
from typing import Any

from strata.config import Settings
from strata.engine.draft import Drafter
from strata.engine.draft_load import with_drafts
from strata.engine.families import ModelConfig
from strata.engine.forward import StageModel
from strata.engine.kv import PagedKV
from strata.engine.mtp_file import Heads, find_heads, num_heads
from strata.engine.mtp_numpy import NumpyMtp
from strata.engine.numpy_ops import NumpyOps
from strata.engine.pipeline import Pipeline
from strata.engine.resources import free_memory
from strata.engine.results import Sampler
from strata.engine.sampling import Spread
from strata.engine.sizes import StagePlan, kv_kind, plan, stage_line, stage_plans
from strata.engine.stage import StageModel as AnyModel
from strata.engine.threads import Threads
from strata.messages import EngineFacts
from strata.weights.gguf import GGUFFile

log = logging.getLogger(__name__)


def describe_on_cpu(
    settings: Settings, file: GGUFFile, config: ModelConfig, spans: Sequence[range], threads: Sequence[int]
) -> tuple[EngineFacts, list[str]]:
    """The engine's sizes, and the plan for people, a line for each stage. Raises as ``assemble_on_cpu``."""
    heads = find_heads(settings, file, config)
    with closing(heads) if heads else nullcontext():
        facts, stages = planned(settings, config, spans, heads)
        plans = enumerate(zip(stages, threads, strict=True))
        return facts, [stage_line(number, stage, count, facts, kv_kind(settings)) for number, (stage, count) in plans]


def planned(
    settings: Settings, config: ModelConfig, spans: Sequence[range], heads: Heads | None
) -> tuple[EngineFacts, list[StagePlan]]:
    """The engine's sizes and its stages', for the memory free now. Raises SettingError."""
    free = free_memory()
    facts = plan(settings, config, free, len(spans), heads)
    return facts, stage_plans(settings, config, spans, facts, heads, free)


def assemble_on_cpu(settings: Settings, file: GGUFFile, config: ModelConfig, spans: Sequence[range], threads: Sequence[int]) -> Pipeline:
    """An engine of one stage with its own threads for each of ``spans``, consecutive layers in order. Raises SettingError, ModelError."""
    with ExitStack() as opened:
        heads = find_heads(settings, file, config)
        if heads is not None:
            opened.callback(heads.close)
        facts, plans = planned(settings, config, spans, heads)
        kind, names, models = kv_kind(settings), [], []
        for number, (stage, count) in enumerate(zip(plans, threads, strict=True)):
            log.info(stage_line(number, stage, count, facts, kind))
            ops = NumpyOps(count, settings.deterministic, stage.experts.limit)
            opened.callback(ops.close)
            kv = PagedKV(config, len(stage.span) + num_heads(stage.heads), facts.num_pages, facts.page_tokens, kind)
            names.append(f"stage {number} (cpu, layers {stage.span.start} to {stage.span.stop - 1})")
            models.append(StageModel(file, config, stage.span, ops, kv))
        spread = spread_over(ops.threads)
        last, drafter = drafting(models[-1], heads, file, facts, spread)
        stages: list[AnyModel] = [*models[:-1], last]
        engine = Pipeline(list(zip(names, stages)), facts, Sampler(spread), release=opened.pop_all().close, draft=drafter)
    engine.memory = tuple(stage.memory for stage in plans)
    return engine


def drafting(
    model: StageModel, heads: Heads | None, file: GGUFFile, facts: EngineFacts, spread: Spread
) -> tuple[AnyModel, Drafter | None]:
    """The last stage and who drafts behind it; nobody where ``facts`` allow no drafts."""
    if not facts.max_drafts:
        return model, None
    model.keeps_hidden = heads is not None
    blocks = [NumpyMtp(heads, number, model, file) for number in range(num_heads(heads))] if heads else []
    return with_drafts(model, blocks, heads, facts, spread)


def spread_over(threads: Threads) -> Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]:
    """``map`` over the threads of the last stage, which rest while tokens are picked."""

    def spread(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        todo = list(items)
        if len(todo) < 2:
            return [function(item) for item in todo]
        results: list[Any] = [None] * len(todo)

        def work(index: int) -> None:
            for number in range(index, len(todo), threads.count):
                results[number] = function(todo[number])

        threads.run(work)
        return results

    return spread
