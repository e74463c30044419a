"""Which layers run where: from the settings, the model and the devices to spans of layers, one for each stage. Loads nothing.

The order of ``devices`` is the order of the stages. Stages are all on the CPU or all on devices: the two round differently, and where
the cut is would then show in the tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from strata.config import Settings
from strata.devices.base import Device, DeviceError
from strata.devices.cuda import CudaDevice, visible_devices
from strata.devices.emulated import EmulatedDevice
from strata.engine.device_load import free_bytes
from strata.engine.device_plan import PAGE_TOKENS, RESERVE, page_bytes, planner, tensor_bytes
from strata.engine.families import ModelConfig
from strata.engine.split import asked_split, balance
from strata.errors import SettingError, StartError
from strata.weights.gguf import GGUFFile, Tensor

PROBE_BYTES = 1 << 26
GIB = 1 << 30


def stage_devices(settings: Settings, config: ModelConfig) -> tuple[list[str], list[range] | None]:
    """The device of each stage by name, and the spans that ``layer_split`` asks for (None: balance them).

    With no devices named: the processors for every stage, or device after device: as many as ``layer_split`` asks for, else every
    visible GPU. Raises SettingError for what cannot be, StartError where there is no GPU.
    """
    if not settings.trim_stage_weights:
        raise SettingError("trim_stage_weights: off is not served; a stage never loads the weights of another's layers")
    names, spans = list(settings.devices), None
    if settings.layer_split is not None:
        spans = asked_split(settings.layer_split, config.num_layers, len(names) or None)
    on_cpu = settings.device == "cpu"
    for name in names:
        if (name == "cpu") != on_cpu or not (on_cpu or name.isdigit()):
            wanted = "each stage is called cpu" if on_cpu else "devices are called by number: 0,1"
            raise SettingError(f"devices: {name} is none of --device {settings.device}, where {wanted}")
    if len(names) > config.num_layers:
        raise SettingError(f"devices: {len(names)} stages, and the model has {config.num_layers} layers; name fewer devices")
    if not names:
        stages = len(spans) if spans else 1
        if settings.device == "cuda" and not spans:
            stages = min(visible_devices(), config.num_layers)
        names = ["cpu" if on_cpu else str(number) for number in range(stages)]
    return names, spans


class Parts:
    """Bytes of a model's parts by ``size`` of a tensor: each layer, what only the first stage has, what only the last has.

    The last has the blocks that draft, too.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, size: Callable[[Tensor], int]) -> None:
        self.layers, self.embedding, self.output = [0] * config.num_layers, 0, 0
        for name, tensor in file.tensors.items():
            block = int(name.split(".")[1]) if name.startswith("blk.") else -1
            if 0 <= block < config.num_layers:
                self.layers[block] += size(tensor)
            elif block >= 0:
                self.output += size(tensor) if block in config.mtp_blocks else 0
            elif name != "token_embd.weight":
                self.output += size(tensor)
            else:
                self.embedding = size(tensor)
                self.output += size(tensor) if config.tied else 0

    def of(self, span: range) -> int:
        """What a stage of these layers keeps; a single stage keeps a tied matrix once, which is here counted twice."""
        first = self.embedding if span.start == 0 else 0
        return sum(self.layers[span.start : span.stop]) + first + (self.output if span.stop == len(self.layers) else 0)


def split_over_threads(file: GGUFFile, config: ModelConfig, threads: Sequence[int]) -> list[range]:
    """A balanced split on the CPU, for stages with so many threads each."""
    parts = Parts(file, config, lambda tensor: row_bytes(tensor, config))
    return balance(parts.layers, parts.output, threads) or [range(config.num_layers)]


def row_bytes(tensor: Tensor, config: ModelConfig) -> int:
    """Float32 bytes of a tensor that one row's pass reads: of experts, those that it goes to."""
    size = 4 * math.prod(tensor.shape)
    return size * config.experts.used // config.experts.count if config.experts and len(tensor.shape) == 3 else size


# ---------------------------------------------------------------- devices


def open_devices(settings: Settings, names: Sequence[str]) -> list[Device]:
    """The devices of these names, in order; one that is named twice is opened once. Raises StartError."""
    cache = settings.kernel_cache

    def opened_one(name: str) -> Device:
        if settings.device == "cuda":
            return cast(Device, CudaDevice(int(name), cache=cache, toolkit=settings.cuda_toolkit))
        return cast(Device, EmulatedDevice(cache=cache, compiler=settings.compiler))

    try:
        opened = {name: opened_one(name) for name in dict.fromkeys(names)}
    except DeviceError as error:
        raise StartError(str(error)) from error
    return [opened[name] for name in names]


def device_lines(names: Sequence[str], devices: Sequence[Device]) -> list[str]:
    """What was found, for people: a line for each device."""
    lines = []
    for name, device in dict(zip(names, devices, strict=True)).items():
        info, memory = device.info, device.memory()
        size = f"{memory.total / GIB:.1f} GiB of memory, {memory.free / GIB:.1f} free"
        lines.append(f"device {name}: " + ", ".join(filter(None, [info.name, info.pci_id, f"sm_{info.arch}" if info.arch else "", size])))
    return lines


def split_over_devices(settings: Settings, file: GGUFFile, config: ModelConfig, devices: Sequence[Device]) -> list[range]:
    """A balanced split that leaves every device room for keys and values: of every slot's full context, else of one, else of a page.

    Where not even the weights fit, the split is balanced all the same: the plan says what is missing.
    """
    context = settings.context or config.context
    parts = Parts(file, config, lambda tensor: tensor_bytes(tensor, packed=True))
    speeds, frees, plan = speeds_of(devices), free_bytes(devices), planner(settings, file, config)
    page = page_bytes(config, 1, plan.kv)
    for tokens in (settings.batch * context, context, 1):
        pages = -(-tokens // PAGE_TOKENS) + 1

        def fits(stage: int, span: range) -> bool:
            fixed = sum(plan.fixed_bytes(span, min(tokens, context)))
            return parts.of(span) + fixed + pages * page * len(span) <= int(frees[stage] * (1 - RESERVE))

        found = balance(parts.layers, parts.output, speeds, fits)
        if found is not None:
            return found
    return balance(parts.layers, parts.output, speeds) or [range(config.num_layers)]


def speeds_of(devices: Sequence[Device]) -> list[float]:
    """Bytes a second that each device reads; devices of one name have one speed, so that a split does not change from start to start."""
    kinds: Mapping[str, Device] = {device.info.name: device for device in devices}
    measured = {name: bandwidth(device) for name, device in kinds.items()} if len(kinds) > 1 else dict.fromkeys(kinds, 1.0)
    return [measured[device.info.name] for device in devices]


def bandwidth(device: Device) -> float:
    """Bytes a second that a copy within the device's memory reads: decoding reads the weights at the same rate."""
    stream = device.stream()
    source, target = (device.allocate((PROBE_BYTES,), np.uint8) for _ in range(2))
    device.copy(target, source, stream)
    stream.synchronize()
    started = time.perf_counter()
    for _ in range(8):
        device.copy(target, source, stream)
    stream.synchronize()
    return 8 * PROBE_BYTES / (time.perf_counter() - started)
