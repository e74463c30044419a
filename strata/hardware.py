"""The devices as /metrics and /v1/status show them: what the engine planned to take of each, and what a GPU says of itself.

The plan never changes. The rest is asked at each scrape, on a thread of its own and with a bound on the wait: a driver that hangs
takes its own figures away and nothing else.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from strata.devices.nvml import GpuReading, Nvml
from strata.engine.stage import StageMemory

PATIENCE = 0.05  # seconds that a scrape waits for the GPUs


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device. Bytes as planned (``weights``, ``kv``, ``work``) and as the driver counts them; None where nobody knows.

    ``utilization``: share of the last moments in which the GPU computed, 0 to 1. Degrees C, watts.
    """

    name: str
    weights: int
    kv: int
    work: int
    total: int | None = None
    free: int | None = None
    utilization: float | None = None
    temperature: float | None = None
    power: float | None = None


class Hardware:
    """``refresh`` before ``view``; both on the loop's thread."""

    def __init__(self, memory: Sequence[StageMemory], open_nvml: Callable[[], Nvml | None] = Nvml.open) -> None:
        self._plans = {name: [each for each in memory if each.device == name] for name in dict.fromkeys(each.device for each in memory)}
        self._gpus = {name: plans[0].pci_id for name, plans in self._plans.items() if plans[0].pci_id}
        self._open = open_nvml
        self._nvml: Nvml | None = None
        self._asked: asyncio.Future[dict[str, GpuReading]] | None = None
        self._readings: dict[str, GpuReading] = {}

    async def refresh(self) -> None:
        """Ask the GPUs, if there are any. A question that is still unanswered is not asked again."""
        if not self._gpus:
            return
        if self._asked is None:
            loop = asyncio.get_running_loop()
            self._asked = loop.create_future()
            # A daemon: nobody waits for a driver that hangs, not even the end of the process.
            threading.Thread(target=self._answer, args=(loop, self._asked), name="strata-nvml", daemon=True).start()
        await asyncio.wait({self._asked}, timeout=PATIENCE)
        self._readings = {}
        if self._asked.done():
            self._readings, self._asked = self._asked.result(), None

    def view(self) -> tuple[DeviceView, ...]:
        return tuple(self._device(name, plans, self._readings.get(name, GpuReading())) for name, plans in self._plans.items())

    def _answer(self, loop: asyncio.AbstractEventLoop, asked: asyncio.Future[dict[str, GpuReading]]) -> None:
        """On the thread; there is one at a time, and it alone touches the library."""
        self._nvml = self._nvml or self._open()
        readings = {name: self._nvml.read(pci_id) for name, pci_id in self._gpus.items()} if self._nvml is not None else {}
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(asked.set_result, readings)

    @staticmethod
    def _device(name: str, plans: Sequence[StageMemory], gpu: GpuReading) -> DeviceView:
        return DeviceView(
            name, sum(each.weights for each in plans), sum(each.kv for each in plans), sum(each.work for each in plans),
            gpu.total_memory, gpu.free_memory, gpu.utilization, gpu.temperature, gpu.power,
        )
