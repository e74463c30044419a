"""From settings and an open model file to a running engine: which stages (placement.py), then what each device makes of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from strata.config import Settings
from strata.devices.base import Device, DeviceError
from strata.engine.cpu_load import assemble_on_cpu, describe_on_cpu
from strata.engine.device_load import assemble_on_devices, plan_on_devices, stage_names
from strata.engine.device_plan import plan_lines
from strata.engine.device_rates import needed_rates
from strata.engine.draft_load import log_drafting
from strata.engine.families import ModelConfig, read_config
from strata.engine.mtp_file import spec_tokens
from strata.engine.pipeline import Pipeline
from strata.engine.placement import device_lines, open_devices, split_over_devices, split_over_threads, stage_devices
from strata.engine.resources import processors
from strata.engine.split import share_threads
from strata.engine.stage_cost import Rates
from strata.errors import StartError
from strata.weights.gguf import GGUFFile, Tensor

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


def load_engine(settings: Settings, file: GGUFFile, progress: Progress = lambda done, total: None) -> Pipeline:
    """An engine for ``file``, not started. ``progress`` gets the bytes of weights taken and in all, in the loading thread.

    Raises ModelError for a model that is not served, SettingError for splits and sizes that do not fit, StartError for a device that
    does not open or compile.
    """
    config = served(settings, file)
    engine = assemble(settings, cast(GGUFFile, CountedFile(file, progress)), config)
    log_drafting(file.path.name, config, engine.facts)
    size = sum(tensor.size for tensor in file.tensors.values())
    try:
        progress(size, size)  # a file may hold tensors that nobody reads
    except BaseException:
        engine.close()
        raise
    return engine


def served(settings: Settings, file: GGUFFile) -> ModelConfig:
    """The model's configuration; without the blocks that draft, where drafts are off: they are not loaded."""
    config = read_config(file)
    return replace(config, mtp_blocks=()) if spec_tokens(settings, config) == 1 else config


def assemble(settings: Settings, file: GGUFFile, config: ModelConfig) -> Pipeline:
    """An engine of the stages that the settings ask for. Raises as ``load_engine``."""
    names, spans = stage_devices(settings, config)
    if settings.device == "cpu":
        threads = share_threads(settings.threads or processors(), len(names))
        return assemble_on_cpu(settings, file, config, spans or split_over_threads(settings, file, config, threads), threads)
    devices, spans, rates = open_and_place(settings, file, config, names, spans)
    for line in device_lines(names, devices):
        log.info(line)
    try:
        engine = assemble_on_devices(settings, file, config, spans, devices, rates)
    except DeviceError as error:
        raise StartError(str(error)) from error
    engine.memory = tuple(replace(memory, device=name) for memory, name in zip(engine.memory, names, strict=True))
    return engine


def open_and_place(
    settings: Settings, file: GGUFFile, config: ModelConfig, names: Sequence[str], spans: list[range] | None
) -> tuple[list[Device], list[range], list[Rates]]:
    """The devices of these names, their layers (``spans`` where asked for), and what was measured of them. Raises StartError."""
    devices = open_devices(settings, names)
    try:
        rates = needed_rates(file, devices, settings.kernel_cache)
        return devices, spans or split_over_devices(settings, file, config, devices, rates), rates
    except DeviceError as error:
        raise StartError(str(error)) from error


def describe_engine(settings: Settings, file: GGUFFile) -> list[str]:
    """The memory plan for people, without reading a weight: a line for each stage, and one for the slots. Raises as ``load_engine``."""
    config = served(settings, file)
    names, spans = stage_devices(settings, config)
    if settings.device == "cpu":
        threads = share_threads(settings.threads or processors(), len(names))
        spans = spans or split_over_threads(settings, file, config, threads)
        facts, lines = describe_on_cpu(settings, file, config, spans, threads)
    else:
        devices, spans, rates = open_and_place(settings, file, config, names, spans)
        facts, _, plans = plan_on_devices(settings, file, config, spans, devices, rates)
        lines = device_lines(names, devices) + plan_lines(stage_names(spans, devices), plans, facts)
    return [*lines, f"{settings.batch} slots, {facts.context} tokens a request at most"]


class CountedFile:
    """A model file that tells how much of it has been taken: what a stage reads of a GGUFFile, and no more."""

    def __init__(self, file: GGUFFile, progress: Progress) -> None:
        self.path, self.metadata = file.path, file.metadata
        self.tensors = CountedTensors(file.tensors, progress)


class CountedTensors(Mapping[str, Tensor]):
    """Reports the stored bytes of all tensors taken so far; one that is taken again does not count again."""

    def __init__(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        self._tensors, self._progress = tensors, progress
        self._left = {name: tensor.size for name, tensor in tensors.items()}
        self._done, self._total = 0, sum(self._left.values())
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        with self._lock:
            size = self._left.pop(name, 0)
            self._done += size
            if size:
                self._progress(self._done, self._total)
        return tensor

    def items(self) -> ItemsView[str, Tensor]:
        """For a look at sizes, which takes nothing."""
        return self._tensors.items()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
