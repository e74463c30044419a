"""From settings and an open model file to an engine on devices: a memory plan first, weights then.

The plan, for each device: its layers' weights in their layouts, the work space of one window, pages for keys and values with the rest.
IQ3_S is kept as nibbles (4.31 bits, fewest instructions) where that leaves a full context for every slot, else packed (3.44 bits).
Both give the same bits. What cannot fit is refused with the numbers before a weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from strata.config import Settings
from strata.devices.base import Device, DeviceInfo
from strata.engine.device_sampling import DeviceSampler
from strata.engine.device_stage import ROW_BUCKETS, load_device_stage
from strata.engine.families import ModelConfig
from strata.engine.kernel_ops import HEAD_ROWS
from strata.engine.pipeline import Pipeline
from strata.errors import ModelError, SettingError
from strata.kernels.attention import num_splits
from strata.kernels.pages import PageShape
from strata.messages import EngineFacts
from strata.weights.gguf import GGUFFile, Tensor
from strata.weights.layouts import PACKED3, padded
from strata.weights.recode import layouts_for

log = logging.getLogger(__name__)

PAGE_TOKENS = 64
RESERVE = 0.05  # of a device's memory: the driver's own, graphs, and what the plan rounds away
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Bytes of one stage. ``page``: of one KV page over its layers; ``room``: what is left for pages."""

    weights: int
    work: int
    page: int
    room: int


def weight_bytes(file: GGUFFile, config: ModelConfig, span: range, packed: bool) -> int:
    """Bytes of layers ``span`` on a device, the model's ends included where the span has them."""
    ends = {"token_embd": span.start == 0 or (config.tied and span.stop == config.num_layers), "output": span.stop == config.num_layers}
    total = 0
    for name, tensor in file.tensors.items():
        part = name.split(".")
        if not (int(part[1]) in span if part[0] == "blk" else ends.get(part[0], span.stop == config.num_layers)):
            continue
        total += tensor_bytes(tensor, packed)
    return total


def tensor_bytes(tensor: Tensor, packed: bool) -> int:
    """Bytes of a tensor on a device: a matrix in its layout, a vector as float32."""
    if len(tensor.shape) < 2:
        return 4 * tensor.shape[0]
    layouts = layouts_for(tensor.type)
    layout = PACKED3 if packed and PACKED3 in layouts else layouts[0]
    return layout.bytes(tensor.shape[0], padded(tensor.shape[1]))


def work_bytes(config: ModelConfig, max_rows: int, context: int) -> int:
    """Bytes of kernel_ops.Workspace, to within the metadata of a window."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    row = 4 * (2 * config.width + heads + 2 * config.ffn_width) + 2 * (config.width + 2 * heads + config.ffn_width)
    splits = 4 * HEAD_ROWS * config.num_heads * num_splits(context) * (config.head_dim + 2)
    return max_rows * row + 4 * HEAD_ROWS * config.vocab_size + splits


def plan_stages(
    file: GGUFFile, config: ModelConfig, spans: Sequence[range], free: Sequence[int], max_rows: int, context: int, packed: bool
) -> list[StagePlan]:
    """One plan per stage; ``free``: bytes free on each stage's device. Raises ModelError for heads that kernels cannot hold."""
    plans = []
    for span, available in zip(spans, free, strict=True):
        try:
            page = PageShape(len(span), config.num_kv_heads, config.head_dim, PAGE_TOKENS).page_bytes
        except ValueError as error:
            raise ModelError(f"{file.path}: {error}; use --device cpu") from error
        weights, work = weight_bytes(file, config, span, packed), work_bytes(config, max_rows, context)
        plans.append(StagePlan(weights, work, page, int(available * (1 - RESERVE)) - weights - work))
    return plans


def size_engine(
    settings: Settings, file: GGUFFile, config: ModelConfig, spans: Sequence[range], free: Sequence[int]
) -> tuple[EngineFacts, bool]:
    """The engine's sizes and whether IQ3_S stays packed. Raises SettingError for what does not fit, with what would."""
    if settings.kv not in (None, "int8"):
        raise SettingError(f"kv: {settings.kv} is not served on a device; it keeps int8")
    if settings.batch > ROW_BUCKETS[-1]:
        raise SettingError(f"batch: {settings.batch} slots; a device decodes at most {ROW_BUCKETS[-1]} rows at once")
    context = settings.context or config.context
    pages_of_context = -(-context // PAGE_TOKENS)
    wanted = settings.batch * pages_of_context
    chunk = max(settings.chunk, ROW_BUCKETS[-1])
    pages, packed, plans = 0, False, []
    for packed in (False, True):
        plans = plan_stages(file, config, spans, free, chunk, context, packed)
        if settings.kv_memory_mib is not None:
            wanted = settings.kv_memory_mib * MIB // sum(plan.page for plan in plans)
        pages = min(wanted, *(plan.room // plan.page - 1 for plan in plans))
        if pages >= wanted:
            break
    if pages < pages_of_context:
        raise SettingError(
            f"context: one conversation of {context} tokens needs {pages_of_context} pages, and {max(pages, 0)} fit beside the weights; "
            + (f"lower --context to {pages * PAGE_TOKENS}" if pages > 0 else "take a smaller model or more devices")
        )
    facts = EngineFacts(
        num_pages=pages, page_tokens=PAGE_TOKENS, context=context, page_bytes=sum(plan.page for plan in plans), chunk=chunk,
        max_rows=settings.batch, num_stages=len(spans),
    )
    return facts, packed


def free_bytes(devices: Sequence[Device]) -> list[int]:
    """Bytes free for each stage; stages on one device share what it has."""
    return [device.memory().free // sum(other is device for other in devices) for device in devices]


def stage_name(number: int, info: DeviceInfo, span: range) -> str:
    """For people: which stage, which device, where it is plugged in, which layers."""
    return f"stage {number} ({' '.join(filter(None, (info.name, info.pci_id)))}, layers {span.start} to {span.stop - 1})"


def plan_lines(
    file: GGUFFile, config: ModelConfig, spans: Sequence[range], devices: Sequence[Device], facts: EngineFacts, packed: bool
) -> list[str]:
    """The plan for people, a line for each stage."""
    plans = plan_stages(file, config, spans, free_bytes(devices), facts.chunk, facts.context, packed)
    return [
        f"{stage_name(number, device.info, span)}: weights {plan.weights // MIB} MiB, work space {plan.work // MIB} MiB, "
        f"{facts.num_pages} pages {facts.num_pages * plan.page // MIB} MiB"
        for number, (span, device, plan) in enumerate(zip(spans, devices, plans, strict=True))
    ]


def assemble_on_devices(
    settings: Settings, file: GGUFFile, config: ModelConfig, spans: Sequence[range], devices: Sequence[Device]
) -> Pipeline:
    """An engine of one stage for each of ``spans`` on the device beside it. Raises SettingError, ModelError, DeviceError."""
    facts, packed = size_engine(settings, file, config, spans, free_bytes(devices))
    for line in plan_lines(file, config, spans, devices, facts, packed):
        log.info(line)
    models: list[tuple[str, Any]] = []  # what leaves the last stage is for the DeviceSampler alone
    for number, (span, device) in enumerate(zip(spans, devices, strict=True)):
        stage = load_device_stage(device, file, config, span, facts, packed)
        models.append((stage_name(number, device.info, span), stage))
    return Pipeline(models, facts, cast(Any, DeviceSampler(models[-1][1].ops)))
