"""Which layers run where: from the settings, the model and the devices to spans of layers, one for each stage. Loads nothing.

The order of ``devices`` is the order of the stages. Stages are all on the CPU or all on devices: the two round differently, and where
the cut is would then show in the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import cast

from strata.config import Settings
from strata.devices.base import Device, DeviceError
from strata.devices.cuda import CudaDevice, visible_devices
from strata.devices.driver import gpu_uuids
from strata.devices.emulated import EmulatedDevice
from strata.engine.device_load import free_bytes
from strata.engine.device_bytes import PAGE_TOKENS, page_bytes, tensor_bytes
from strata.engine.device_plan import RESERVE, planner
from strata.engine.families import ModelConfig
from strata.engine.split import asked_split, balance
from strata.engine.stage_cost import Rates, costs, device_seconds, float_seconds
from strata.errors import SettingError, StartError
from strata.weights.gguf import GGUFFile, Tensor

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
        fault = name_fault(name, settings.device)
        if fault:
            raise SettingError(f"devices: {name} {fault}")
    if len(names) > config.num_layers:
        raise SettingError(f"devices: {len(names)} stages, and the model has {config.num_layers} layers; name fewer devices")
    if not names:
        stages = len(spans) if spans else 1
        if settings.device == "cuda" and not spans:
            stages = min(visible_devices(), config.num_layers)
        names = ["cpu" if on_cpu else str(number) for number in range(stages)]
    return names, spans


UUID = re.compile(r"(gpu-|mig-)[0-9a-f-]+|[0-9a-f]{4}[0-9a-f-]*", re.IGNORECASE)


def name_fault(name: str, kind: str) -> str:
    """Why a stage cannot be on ``name`` with --device ``kind``, and what to write instead; "" where it can."""
    if name == "cpu":
        mixed = "beside devices: the two round differently, and tokens would depend on the cut"
        return "" if kind == "cpu" else f"is not served {mixed}; name devices alone, or take --device cpu"
    if kind == "cpu":
        return f"is not the CPU, where each stage is called cpu; write cpu,cpu for two, or take --device cuda for GPU {name}"
    if name.isdigit() or (kind == "cuda" and UUID.fullmatch(name)):
        return ""
    by_uuid = ", or by UUID: GPU-..., as nvidia-smi -L prints it" if kind == "cuda" else ""
    return f"is no device; devices are called by number: 0,1{by_uuid}"


def gpu_number(name: str, uuids: Sequence[str]) -> int:
    """The number of the GPU of this name. ``uuids``: of the visible ones, in order. Raises SettingError."""
    if name.isdigit():
        return int(name)
    wanted = name.lower().removeprefix("gpu-").removeprefix("mig-")
    found = [number for number, uuid in enumerate(uuids) if uuid.lower().removeprefix("gpu-").startswith(wanted)]
    if len(found) != 1:
        seen = ", ".join(f"{number} is {uuid or 'without a UUID'}" for number, uuid in enumerate(uuids))
        raise SettingError(f"devices: {name} names {'more than one' if found else 'no'} visible GPU; {seen}")
    return found[0]


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


def split_over_threads(settings: Settings, file: GGUFFile, config: ModelConfig, threads: Sequence[int]) -> list[range]:
    """A balanced split on the CPU, for stages with so many threads each."""
    whole = [range(config.num_layers)]
    if len(threads) == 1:
        return whole
    return balance([costs(settings, file, config, float_seconds(config, count)) for count in threads]) or whole


# ---------------------------------------------------------------- devices


def open_devices(settings: Settings, names: Sequence[str]) -> list[Device]:
    """The devices of these names, in order; one that is named twice is opened once. Raises SettingError, StartError."""
    numbers: list[int | str] = list(names)
    if settings.device == "cuda":
        uuids = [] if all(map(str.isdigit, names)) else gpu_uuids(visible_devices())
        numbers = [gpu_number(name, uuids) for name in names]
    cache = settings.kernel_cache

    def opened_one(number: int | str) -> Device:
        if settings.device == "cuda":
            return cast(Device, CudaDevice(int(number), cache=cache, toolkit=settings.cuda_toolkit))
        return cast(Device, EmulatedDevice(cache=cache, compiler=settings.compiler))

    try:
        opened = {number: opened_one(number) for number in dict.fromkeys(numbers)}
    except DeviceError as error:
        raise StartError(str(error)) from error
    return [opened[number] for number in numbers]


def device_lines(names: Sequence[str], devices: Sequence[Device]) -> list[str]:
    """What was found, for people: a line for each device."""
    lines = []
    for name, device in dict(zip(names, devices, strict=True)).items():
        info, memory = device.info, device.memory()
        size = f"{memory.total / GIB:.1f} GiB of memory, {memory.free / GIB:.1f} free"
        facts = [info.name, info.pci_id, info.uuid, f"sm_{info.arch}" if info.arch else "", size]
        lines.append(f"device {name}: " + ", ".join(filter(None, facts)))
    return lines


def split_over_devices(
    settings: Settings, file: GGUFFile, config: ModelConfig, devices: Sequence[Device], rates: Sequence[Rates]
) -> list[range]:
    """A balanced split that leaves every device room for keys and values: of every slot's full context, else of one, else of a page.

    ``rates``: of each device. Where not even the weights fit, the split is balanced all the same: the plan says what is missing.
    """
    whole = [range(config.num_layers)]
    if len(devices) == 1:
        return whole
    context = settings.context or config.context
    parts = Parts(file, config, lambda tensor: tensor_bytes(tensor, packed=True))
    stages = [costs(settings, file, config, device_seconds(config, each)) for each in rates]
    frees, plan = free_bytes(devices), planner(settings, file, config)
    page = page_bytes(config, 1, plan.kv)
    for tokens in (settings.batch * context, context, 1):
        pages = -(-tokens // PAGE_TOKENS) + 1

        def fits(stage: int, span: range) -> bool:
            fixed = sum(plan.fixed_bytes(span, min(tokens, context)))
            return parts.of(span) + fixed + pages * page * len(span) <= int(frees[stage] * (1 - RESERVE))

        found = balance(stages, fits)
        if found is not None:
            return found
    return balance(stages) or whole
