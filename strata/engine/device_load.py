"""From settings and an open model file to an engine on devices: the memory plan (device_plan.py) first, weights then."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

from strata.config import Settings
from strata.devices.base import Device, DeviceInfo
from strata.engine.device_plan import plan_lines, planner, size_engine
from strata.engine.device_sampling import DeviceSampler
from strata.engine.device_stage import load_device_stage
from strata.engine.families import ModelConfig
from strata.engine.pipeline import Pipeline
from strata.messages import EngineFacts
from strata.weights.gguf import GGUFFile

log = logging.getLogger(__name__)


def free_bytes(devices: Sequence[Device]) -> list[int]:
    """Bytes free for each stage; stages on one device share what it has."""
    return [device.memory().free // sum(other is device for other in devices) for device in devices]


def stage_name(number: int, info: DeviceInfo, span: range) -> str:
    """For people: which stage, which device, where it is plugged in, which layers."""
    return f"stage {number} ({' '.join(filter(None, (info.name, info.pci_id)))}, layers {span.start} to {span.stop - 1})"


def plan_on_devices(
    settings: Settings, file: GGUFFile, config: ModelConfig, spans: Sequence[range], devices: Sequence[Device]
) -> tuple[EngineFacts, bool, list[str]]:
    """The engine's sizes, whether IQ3_S stays packed, and the plan for people, a line for each stage. Raises SettingError, ModelError."""
    free = free_bytes(devices)
    facts, packed = size_engine(settings, file, config, spans, free)
    names = [stage_name(number, device.info, span) for number, (span, device) in enumerate(zip(spans, devices, strict=True))]
    return facts, packed, plan_lines(names, planner(settings, file, config).stages(spans, free, facts.context, packed), facts)


def assemble_on_devices(
    settings: Settings, file: GGUFFile, config: ModelConfig, spans: Sequence[range], devices: Sequence[Device]
) -> Pipeline:
    """An engine of one stage for each of ``spans`` on the device beside it. Raises SettingError, ModelError, DeviceError."""
    facts, packed, lines = plan_on_devices(settings, file, config, spans, devices)
    for line in lines:
        log.info(line)
    models: list[tuple[str, Any]] = []  # what leaves the last stage is for the DeviceSampler alone
    for number, (span, device) in enumerate(zip(spans, devices, strict=True)):
        stage = load_device_stage(device, file, config, span, facts, packed, planner(settings, file, config).kv)
        models.append((stage_name(number, device.info, span), stage))
    return Pipeline(models, facts, cast(Any, DeviceSampler(models[-1][1].ops)))
