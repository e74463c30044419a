"""Rates of layouts: measured through the engine's own launchers, kept by kind, asked for only where something hangs on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.devices.emulated import EmulatedDevice
from strata.engine import device_rates
from strata.engine.device_rates import known_rates, layouts_of, measure_rates, needed_rates, rates_of
from strata.weights.formats import BY_NAME
from strata.weights.gguf import GGUFFile
from tests.engine.running import DATA, TINY

pytestmark = pytest.mark.cxx
NAMES = ["packed3", "odd4", "half"]


class Clocked(EmulatedDevice):
    """An emulated device that says it is a GPU, and lets a second pass between two events."""

    def __init__(self, name: str = "card", arch: int = 86) -> None:
        super().__init__()
        self.info = replace(self.info, name=name, arch=arch)

    def seconds_between(self, start: Any, end: Any) -> float:
        assert start.query() and end.query() and start.passed_at < end.passed_at
        return 1.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rates, "MATRIX", (32, 256))
    monkeypatch.setattr(device_rates, "ROTATED", 1 << 14)
    monkeypatch.setattr(device_rates, "REPLAYS", 2)


def test_a_rate_is_the_bytes_that_products_read_in_a_second() -> None:
    device = Clocked()
    free = device.memory().free
    rates = measure_rates(device, NAMES)
    for name in NAMES:
        size = device_rates.LAYOUTS[name].bytes(32, 256)
        assert rates[name] == 2 * size * max(2, (1 << 14) // size)
    assert device.memory().free == free, "the matrices are gone"


def test_a_kind_of_device_is_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rates_of([Clocked(), Clocked("other", 90), Clocked()], NAMES, tmp_path)
    assert first[0] == first[1] and first[0] is first[2] and len(list(tmp_path.glob("rates-*.json"))) == 2
    seen: list[list[str]] = []
    monkeypatch.setattr(device_rates, "measure_rates", lambda device, layouts: seen.append(list(layouts)) or {"flat8": 7.0})
    assert known_rates(Clocked(), NAMES, tmp_path) == first[0] and seen == []
    assert known_rates(Clocked(), [*NAMES, "flat8"], tmp_path) == {**first[0], "flat8": 7.0} and seen == [["flat8"]]
    assert known_rates(Clocked(), ["flat8"], tmp_path)["flat8"] == 7.0 and len(seen) == 1
    [file] = [path for path in tmp_path.glob("rates-*.json") if json.loads(path.read_text())["device"] == "card"]
    for broken in ("", "[]", '{"bytes_per_second": {"flat8": 0}}', '{"bytes_per_second": {"flat8": "x"}}'):
        file.write_text(broken)
        assert known_rates(Clocked(), ["flat8"], tmp_path) == {"flat8": 7.0}
    assert seen[1:] == [["flat8"]] * 4


def test_nothing_is_measured_where_nothing_hangs_on_it(tmp_path: Path) -> None:
    assert rates_of([EmulatedDevice()], NAMES, tmp_path) == [None]
    with GGUFFile.open(DATA / "golden" / "qwen3.gguf") as file:
        assert {tensor.type.name for _, tensor in file.tensors.items() if len(tensor.shape) > 1} <= {"F32", "F16", "Q8_0"}
        assert needed_rates(file, [Clocked()], tmp_path) == [None] and not list(tmp_path.iterdir())
        assert [set(rates or ()) for rates in needed_rates(file, [Clocked()] * 2, tmp_path)] != [set(), set()]
    with GGUFFile.open(TINY) as file:
        [rates] = needed_rates(file, [Clocked()], tmp_path)
        assert {"packed3", "odd4"} <= set(rates or ())
    assert layouts_of([BY_NAME["IQ3_S"], BY_NAME["F16"], BY_NAME["Q8_0"]]) == ["flat8", "half", "odd4", "packed3"]
