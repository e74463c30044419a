"""From settings and an open model file to an engine on devices: the memory plan (device_plan.py) first, weights then."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing, nullcontext
from typing import Any, cast

from strata.config import Settings
from strata.devices.base import Device, DeviceInfo
from strata.engine.device_plan import Planner, StagePlan, plan_lines, planner, size_engine
from strata.engine.device_sampling import DeviceSampler
from strata.engine.device_build import Drafting, StageSource, load_device_stage
from strata.engine.device_stage import connect
from strata.engine.draft import Drafter, Source
from strata.engine.families import ModelConfig
from strata.engine.lookup import Lookup
from strata.engine.mtp_file import find_heads
from strata.engine.pipeline import Pipeline
from strata.engine.stage import StageMemory
from strata.engine.stage_cost import Rates, packed_is_faster
from strata.messages import EngineFacts
from strata.weights.gguf import GGUFFile
from strata.weights.layouts import PACKED3
from strata.weights.recode import layouts_for

log = logging.getLogger(__name__)


def free_bytes(devices: Sequence[Device]) -> list[int]:
    """Bytes free for each stage; stages on one device share what it has."""
    return [device.memory().free // sum(other is device for other in devices) for device in devices]


def stage_name(number: int, info: DeviceInfo, span: range) -> str:
    """For people: which stage, which device, where it is plugged in, which layers."""
    return f"stage {number} ({' '.join(filter(None, (info.name, info.pci_id)))}, layers {span.start} to {span.stop - 1})"


def plan_on_devices(
    settings: Settings, file: GGUFFile, config: ModelConfig, spans: Sequence[range], devices: Sequence[Device],
    rates: Sequence[Rates] | None = None,
) -> tuple[EngineFacts, tuple[bool, ...], list[StagePlan]]:  # fmt: skip
    """The engine's sizes, whether each stage keeps IQ3_S packed, and each stage's plan. ``rates``: as measured, of each device.

    Raises SettingError, ModelError.
    """
    heads = find_heads(settings, file, config)
    with closing(heads) if heads else nullcontext():
        return sized(settings, planner(settings, file, config, heads), spans, devices, rates)


def sized(
    settings: Settings, plan: Planner, spans: Sequence[range], devices: Sequence[Device], rates: Sequence[Rates] | None
) -> tuple[EngineFacts, tuple[bool, ...], list[StagePlan]]:
    """As plan_on_devices."""
    free = free_bytes(devices)
    facts, packed = size_engine(settings, plan, spans, free, list(map(packed_is_faster, rates)) if rates else None)
    return facts, packed, plan.stages(spans, free, facts.context, packed)


def stage_names(spans: Sequence[range], devices: Sequence[Device]) -> list[str]:
    return [stage_name(number, device.info, span) for number, (span, device) in enumerate(zip(spans, devices, strict=True))]


def assemble_on_devices(
    settings: Settings, file: GGUFFile, config: ModelConfig, spans: Sequence[range], devices: Sequence[Device],
    rates: Sequence[Rates] | None = None,
) -> Pipeline:  # fmt: skip
    """An engine of one stage for each of ``spans`` on the device beside it. Raises SettingError, ModelError, DeviceError."""
    heads = find_heads(settings, file, config)
    with closing(heads) if heads else nullcontext():
        plan = planner(settings, file, config, heads)
        facts, packed, plans = sized(settings, plan, spans, devices, rates)
        names = stage_names(spans, devices)
        for line in plan_lines(names, plans, facts):
            log.info(line)
        if any(PACKED3 in layouts_for(tensor.type) for _, tensor in file.tensors.items()):
            for name, is_packed in zip(names, packed):
                log.info("%s keeps IQ3_S %s", name, "packed" if is_packed else "as nibbles")
        sources = [StageSource(file, config, facts, is_packed, plan.kv) for is_packed in packed]
        stages = [load_device_stage(device, source, span) for device, source, span in zip(devices, sources, spans[:-1])]
        drafting = None if heads is None else Drafting(heads, plan.draft_sizes(heads, facts.context, facts.num_pages + 1))
        stages.append(load_device_stage(devices[-1], sources[-1], spans[-1], drafting))
    connect(stages, settings.peer_copy)
    models: list[Any] = list(zip(names, stages))  # what leaves the last stage is for the DeviceSampler alone
    sampler = cast(Any, DeviceSampler(stages[-1].ops))
    engine = Pipeline(models, facts, sampler, draft=drafter(facts, stages[-1].mtp))
    engine.memory = tuple(
        StageMemory(device.info.name, each.weights, facts.num_pages * each.page, each.work + each.graphs, device.info.pci_id)
        for each, device in zip(plans, devices, strict=True)
    )
    return engine


def drafter(facts: EngineFacts, mtp: Source | None) -> Drafter | None:
    """Who drafts; nobody where ``facts`` allow no drafts."""
    if not facts.max_drafts:
        return None
    return Drafter([Lookup(), mtp] if mtp else [Lookup()])
