"""What /metrics shows of devices: plans added up by device, GPUs asked at each scrape, a driver that hangs left alone."""

from __future__ import annotations

import threading
from typing import Any

from strata.devices.nvml import GpuReading
from strata.engine.stage import StageMemory
from strata.hardware import DeviceView, Hardware

READING = GpuReading(1000, 400, 0.5, 60.0, 200.0)


class Driver:
    """Answers with ``READING`` for the first GPU; ``gate`` holds an answer up."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[str] = []

    def read(self, pci_id: str) -> GpuReading:
        self.asked.append(pci_id)
        self.gate.wait(60)
        return READING if pci_id == "a" else GpuReading()


def hardware(driver: Any, *memory: StageMemory) -> Hardware:
    return Hardware(memory, lambda: driver)


async def test_stages_of_one_device_add_up() -> None:
    found = hardware(None, StageMemory("0", 1, 2, 3, "a"), StageMemory("1", 10, 20, 30, "b"), StageMemory("0", 100, 200, 300, "a"))
    await found.refresh()
    assert found.view() == (DeviceView("0", 101, 202, 303), DeviceView("1", 10, 20, 30))
    cpu = hardware(None, StageMemory("cpu", 1, 2, 3), StageMemory("cpu", 10, 20, 30))
    assert cpu.view() == (DeviceView("cpu", 11, 22, 33),)


async def test_gpus_are_asked_at_each_scrape_and_nothing_else_is() -> None:
    driver = Driver()
    found = hardware(driver, StageMemory("0", 1, 2, 3, "a"), StageMemory("1", 1, 2, 3, "b"))
    for _ in range(2):
        await found.refresh()
        first, second = found.view()
        assert first == DeviceView("0", 1, 2, 3, 1000, 400, 0.5, 60.0, 200.0) and second == DeviceView("1", 1, 2, 3)
    assert driver.asked == ["a", "b"] * 2
    await hardware(driver, StageMemory("cpu", 1, 2, 3)).refresh()
    assert len(driver.asked) == 4


async def test_a_driver_that_hangs_takes_its_own_figures_away() -> None:
    driver = Driver()
    found = hardware(driver, StageMemory("0", 1, 2, 3, "a"))
    driver.gate.clear()
    for _ in range(3):
        await found.refresh()
        assert found.view() == (DeviceView("0", 1, 2, 3),)
    assert driver.asked == ["a"], "asked once, however often there is a scrape"
    driver.gate.set()
    while found.view()[0].total is None:
        await found.refresh()
    assert found.view()[0].free == 400
