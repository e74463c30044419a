"""What fits on devices: a memory plan for each stage before a weight is read. Pure: free bytes are arguments.

A device holds its layers' weights in their layouts, the work space of one window, its graphs, and pages for keys and values with the rest.
IQ3_S is kept as nibbles (4.31 bits) or packed (3.44 bits), whichever the device was measured to multiply quicker, and packed wherever
nibbles would leave fewer pages than wanted. Each stage has its own choice: both give the same bits. A context that was not asked for
shrinks to what fits; one that was asked for is kept or refused, with what would fit instead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from strata.config import Settings
from strata.engine.device_bytes import (
    PAGE_TOKENS, check_model, draft_graph_bytes, draft_weight_bytes, draft_work_bytes, page_bytes, weight_bytes, work_bytes,
)  # fmt: skip
from strata.engine.device_space import DraftSizes, draft_sizes, window_sizes
from strata.engine.draft_load import draft_facts
from strata.devices.base import GRID_LIMITS
from strata.engine.families import ModelConfig
from strata.engine.graphs import ROW_BUCKETS, graph_bytes, launches_of
from strata.engine.hop import PLACES
from strata.engine.mtp_file import Heads, spec_tokens
from strata.errors import SettingError
from strata.messages import EngineFacts
from strata.weights.gguf import GGUFFile

log = logging.getLogger(__name__)

RESERVE = 0.05  # of a device's memory: the driver's own, and what the plan rounds away
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Bytes of one stage. ``page``: of one KV page over its layers; ``room``: what is left for pages, negative where nothing is."""

    weights: int
    work: int
    graphs: int
    page: int
    room: int

    @property
    def pages(self) -> int:
        """Pages that fit beside the scratch page."""
        return max(0, self.room // self.page - 1)


@dataclass(frozen=True, slots=True)
class Planner:
    """The numbers that do not change while a plan is sought. ``free``: bytes free for each stage; ``heads`` that draft, on the last."""

    file: GGUFFile
    config: ModelConfig
    heads: Heads | None
    kv: str
    chunk: int
    slots: int
    spec: int
    peer_copy: bool = False

    @property
    def max_rows(self) -> int:
        """Of a decode window: each slot's token and drafts, as far as windows go."""
        return min(self.slots * self.spec, ROW_BUCKETS[-1])

    def drafts(self, span: range) -> Heads | None:
        return self.heads if span.stop == self.config.num_layers else None

    def draft_sizes(self, heads: Heads, context: int, pages: int = 0) -> DraftSizes:
        vocab = heads.config.vocab_size if heads.vocabulary is None else len(heads.vocabulary)
        rows = window_sizes(self.chunk, self.max_rows, context).rows
        return draft_sizes(rows, self.slots, pages, context, PAGE_TOKENS, self.spec - 1, vocab)

    def fixed_bytes(self, span: range, context: int) -> tuple[int, int]:
        """What a stage needs besides weights and pages: to work, and for its graphs."""
        sizes, heads = window_sizes(self.chunk, self.max_rows, context), self.drafts(span)
        graphs = graph_bytes(launches_of(self.config, span), self.max_rows, context)
        work = work_bytes(self.config, sizes, span.stop == self.config.num_layers, self.kv)
        if heads is not None:
            work += draft_work_bytes(self.config, self.draft_sizes(heads, context))
            graphs += draft_graph_bytes(heads, self.slots, context)
        if self.peer_copy and span.start:
            work += PLACES * 4 * sizes.rows * self.config.width
        return work, graphs

    def page(self, span: range) -> int:
        """Of one page; a head's layer is one more, and a hidden row stays with each page."""
        if self.drafts(span) is None:
            return page_bytes(self.config, len(span), self.kv)
        return page_bytes(self.config, len(span) + 1, self.kv) + 4 * self.config.width

    def weights(self, span: range, packed: bool) -> int:
        heads, own = self.drafts(span), weight_bytes(self.file, self.config, span, packed)
        return own if heads is None else own + draft_weight_bytes(heads, self.file, self.config, span.start == 0, packed)

    def stages(self, spans: Sequence[range], free: Sequence[int], context: int, packed: Sequence[bool]) -> list[StagePlan]:
        """``packed``: of each stage, whether IQ3_S is."""
        plans = []
        for span, available, is_packed in zip(spans, free, packed, strict=True):
            weights, (work, graphs) = self.weights(span, is_packed), self.fixed_bytes(span, context)
            plans.append(StagePlan(weights, work, graphs, self.page(span), int(available * (1 - RESERVE)) - weights - work - graphs))
        return plans

    def largest_context(self, spans: Sequence[range], free: Sequence[int], limit: int, each: int) -> int:
        """The longest context up to ``limit`` of which ``each`` slots have a full one at once; 0 where none has."""
        low, high = 0, -(-limit // PAGE_TOKENS)  # in pages
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.most_pages(spans, free, middle * PAGE_TOKENS) >= each * middle else (low, middle - 1)
        return min(low * PAGE_TOKENS, limit)

    def most_pages(self, spans: Sequence[range], free: Sequence[int], context: int) -> int:
        """Pages that fit on every stage with the smallest weights."""
        return min(plan.pages for plan in self.stages(spans, free, context, [True] * len(spans)))

    def most_slots(self, spans: Sequence[range], free: Sequence[int], context: int) -> int:
        """The most slots, up to those asked for, with which one conversation of ``context`` fits; 0 where it never does.

        Fewer slots need less to work in, and fewer graphs.
        """
        pages = -(-context // PAGE_TOKENS)
        fitting = (slots for slots in range(self.slots, 0, -1) if replace(self, slots=slots).most_pages(spans, free, context) >= pages)
        return next(fitting, 0)


def planner(settings: Settings, file: GGUFFile, config: ModelConfig, heads: Heads | None = None) -> Planner:
    """Raises SettingError and ModelError for what no device serves."""
    check_model(file, config)
    kv = settings.kv or "int8"
    if kv not in KV_KINDS:
        raise SettingError(f"kv: {kv} is not served on a device; it keeps {' or '.join(KV_KINDS)}")
    if settings.batch > ROW_BUCKETS[-1]:
        raise SettingError(f"batch: {settings.batch} slots; a device decodes at most {ROW_BUCKETS[-1]} rows at once")
    rows, most = max(settings.chunk, ROW_BUCKETS[-1]), GRID_LIMITS[1]
    if rows > most:
        raise SettingError(f"chunk: {rows} tokens; a device reads at most {most} at once")
    return Planner(file, config, heads, kv, rows, settings.batch, spec_tokens(settings, config), settings.peer_copy)


KV_KINDS = ("int8", "f16")


def size_engine(
    settings: Settings, plan: Planner, spans: Sequence[range], free: Sequence[int], packed_first: Sequence[bool] | None = None
) -> tuple[EngineFacts, tuple[bool, ...]]:
    """The engine's sizes, and for each stage whether IQ3_S stays packed. Raises SettingError for what does not fit, with what would.

    ``packed_first``: for each stage whether its device multiplies packed weights quicker; default: none does.
    """
    context = fitting_context(settings, plan, spans, free)
    wanted = settings.batch * -(-context // PAGE_TOKENS)
    if settings.kv_memory_mib is not None:
        wanted = settings.kv_memory_mib * MIB // sum(map(plan.page, spans))
    most = plan.most_pages(spans, free, context)
    pages = min(wanted, most)
    if pages * PAGE_TOKENS < context or (settings.kv_memory_mib is not None and pages < wanted):
        raise SettingError(
            f"kv_memory_mib: {settings.kv_memory_mib} MiB are {wanted} pages of {PAGE_TOKENS} tokens; a context of {context} needs "
            f"{-(-context // PAGE_TOKENS)}, and {most} fit beside the weights"
        )
    nibbles = plan.stages(spans, free, context, [False] * len(spans))
    packed = choose_packed(nibbles, pages, packed_first or [False] * len(spans))
    plans = plan.stages(spans, free, context, packed)
    facts = EngineFacts(
        num_pages=pages, page_tokens=PAGE_TOKENS, context=context, page_bytes=sum(each.page for each in plans), chunk=plan.chunk,
        max_rows=settings.batch, num_stages=len(spans),
    )
    return replace(draft_facts(settings, plan.config, facts, plan.heads), max_rows=plan.max_rows), packed


def choose_packed(nibbles: Sequence[StagePlan], pages: int, packed_first: Sequence[bool]) -> tuple[bool, ...]:
    """For each stage whether IQ3_S stays packed: where that is quicker, and where ``nibbles`` leave no room for ``pages``."""
    return tuple(first or plan.pages < pages for plan, first in zip(nibbles, packed_first, strict=True))


def fitting_context(settings: Settings, plan: Planner, spans: Sequence[range], free: Sequence[int]) -> int:
    """The context that was asked for, or as much as fits of the model's own. Raises SettingError."""
    context = settings.context or plan.config.context
    largest = plan.largest_context(spans, free, context, 1)
    if not largest:
        raise SettingError(nothing_fits(plan, spans, free))
    if largest < context:
        if settings.context is not None:
            raise SettingError(context_does_not_fit(plan, spans, free, context, largest))
        log.warning("context is %d tokens instead of %d: the devices' memory holds no more", largest, context)
    return largest


def nothing_fits(plan: Planner, spans: Sequence[range], free: Sequence[int]) -> str:
    """What the stage that lacks most needs and has."""
    plans = plan.stages(spans, free, PAGE_TOKENS, [True] * len(spans))
    number = min(range(len(plans)), key=lambda index: plans[index].room - 2 * plans[index].page)
    short, span = plans[number], spans[number]
    needed = short.weights + short.work + short.graphs + 2 * short.page
    slots = plan.most_slots(spans, free, PAGE_TOKENS)
    less = f"--batch {slots} (one page would fit), or a lower --chunk" if slots else "or a lower --chunk"
    return (
        f"model: stage {number}, layers {span.start} to {span.stop - 1}, needs {-(-needed // MIB)} MiB "
        f"({short.weights // MIB} for weights) and {int(free[number] * (1 - RESERVE)) // MIB} are free for it; "
        f"take more devices, a smaller model, {less}"
    )


def context_does_not_fit(plan: Planner, spans: Sequence[range], free: Sequence[int], context: int, largest: int) -> str:
    """The refusal of a context that was asked for, with the contexts and slots that would do."""
    every, slots = plan.largest_context(spans, free, context, plan.slots), plan.most_slots(spans, free, context)
    text = f"context: one conversation of {context} tokens does not fit beside the weights; the largest that fits is --context {largest}"
    if plan.slots > 1 and every:
        text += f", and {plan.slots} slots have a full one each up to --context {every}"
    if slots:
        text += f"; with --batch {slots} one of {context} fits"
    if plan.kv == "f16":
        text += "; --kv int8 holds about twice as much"
    return text


def plan_lines(names: Sequence[str], plans: Sequence[StagePlan], facts: EngineFacts) -> list[str]:
    """The plan for people, a line for each stage."""
    return [
        f"{name}: weights {plan.weights // MIB} MiB, work space {plan.work // MIB} MiB, graphs {plan.graphs // MIB} MiB, "
        f"{facts.num_pages} pages {facts.num_pages * plan.page // MIB} MiB"
        for name, plan in zip(names, plans, strict=True)
    ]
