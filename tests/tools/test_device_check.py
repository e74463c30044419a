"""tools/device_check.py on the emulated device, in tiny sizes, and where there is nothing to check."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strata.devices.host_compiler import find_compiler
from tools import device_check

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (g++ or clang++) found")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """The exit status, the JSON line, and everything printed."""
    status = device_check.main([*arguments])
    text = capsys.readouterr().out
    return status, json.loads(text.splitlines()[-1]), text


def test_without_a_gpu_it_says_so_and_succeeds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(kind: str, number: int) -> Any:
        raise device_check.StartError("no GPU is visible")

    monkeypatch.setattr(device_check, "open_device", nothing)
    status, facts, text = run(capsys)
    assert status == 0 and facts == {"device": None, "reason": "no GPU is visible"} and "nothing was checked" in text


@pytest.mark.cxx
@needs_compiler
def test_everything_is_measured_and_the_tests_run(capsys: pytest.CaptureFixture[str]) -> None:
    status, facts, text = run(capsys, "--device", "emulated")
    assert status == 0 and facts["failed"] == []
    assert facts["tests"]["tests"] >= 1 and facts["tests"]["failures"] == 0
    assert [(one["layout"], one["rows"]) for one in facts["matvec"]] == [(x, n) for x in ("packed3", "odd4", "flat8") for n in (1, 2, 4, 8)]
    assert [(one["kv"], one["context"]) for one in facts["attention"]] == [(kv, n) for kv in ("int8", "f16") for n in (64, 300)]
    assert facts["launch"]["graph_us"] > 0 and "| attention | 300 tokens, f16 |" in text
    for model in ("model_4bit", "model_packed"):
        runs = facts[model]
        assert runs["equal"] and runs["layers"] == 2
        assert runs["two_stages"]["memory_mb"] == runs["two_stages_two_groups"]["memory_mb"] > 0, "each run gives back what it took"
        assert all(runs[name]["ms"] > 0 for name in ("rows_1", "rows_2", "two_stages", "two_stages_two_groups"))
    assert facts["model_packed"]["weights_mb"] <= facts["model_4bit"]["weights_mb"]
    assert text.count("| matvec |") == 12 and text.count("| model_4bit |") == 4


@pytest.mark.cxx
@needs_compiler
def test_a_part_that_fails_is_named_and_the_others_go_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise device_check.DeviceError("lost")

    monkeypatch.setattr(device_check, "matvec_rates", broken)
    monkeypatch.setattr(device_check.Check, "model", broken)
    status, facts, text = run(capsys, "--device", "emulated", "--no-tests")
    assert status == 1 and facts["failed"] == ["matvec", "model_4bit", "model_packed"]
    assert facts["matvec"] == "failed: DeviceError: lost" and facts["attention"] and "tests" not in facts and "| attention |" in text


@pytest.mark.cxx
@needs_compiler
def test_what_would_begin_too_late_is_left_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "LIMIT_S", -1.0)
    status, facts, _ = run(capsys, "--device", "emulated")
    assert status == 0 and facts["tests"] == facts["model_4bit"] == "left out: no time"


@pytest.mark.cxx
@needs_compiler
def test_a_machine_without_the_packages_of_tests_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "TEST_PACKAGES", ("pytest", "no_such_package"))
    monkeypatch.setattr(device_check.Check, "measure", lambda self: self.part("launch", lambda: 1 / 0))
    status, facts, _ = run(capsys, "--device", "emulated")
    assert facts["tests"] == "left out: no no_such_package here (setup.cfg, extra test)"
    assert status == 1 and facts["failed"] == ["launch"] and facts["launch"] == "failed: ZeroDivisionError: division by zero"
