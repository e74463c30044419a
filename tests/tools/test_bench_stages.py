"""tools/bench_stages.py on the tiny model: every arm is measured and predicted, and what it counts is right."""

from __future__ import annotations

import json

import pytest

from strata.messages import Finished, NewTokens, Usage
from tests.e2e.serving import TINY
from tools._stages import Arm, Meter, formula, suggest
from tools.bench_stages import main


def test_every_arm_is_measured_and_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(TINY), "--rounds", "1", "--tokens", "40", "--streams", "4"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    arms = {name: values for name, values in found.items() if isinstance(values, dict)}
    assert list(arms) == ["1 stage, 2 threads", "2 stages, 1 group", "2 stages, 2 groups", "2 stages, auto"]
    assert all(values["tokens_s"] > 0 and all(figure > 0 for figure in values["predicted"]) for values in arms.values())
    assert found["layers"] == [2, 2]


def test_tokens_count_while_everybody_decodes() -> None:
    now = [0.0]
    meter = Meter(2, lambda: now[0])
    for when, name, tokens in [(0, "a", 1), (1, "a", 1), (2, "b", 1), (3, "a", 1), (4, "b", 2)]:
        now[0] = when
        meter.take(NewTokens(name, (7,) * tokens))
    now[0] = 6
    meter.take(Finished("a", "length", Usage(1)))
    meter.take(NewTokens("b", (7,)))
    assert meter.rate == 3 / (6 - 2) and meter.left == 1


def test_predictions_are_the_formula() -> None:
    assert formula([(0.02, 0.01)] * 2, 8, 0.0) == pytest.approx(8 / 0.04)
    assert formula([(0.02, 0.01)], 8, 0.005) == pytest.approx(8 / 0.035)
    arm = Arm("x", 2, 2, 8, windows=[(4, (0.1, 0.3))] * 3 + [(4, (9.0, 9.0))] * 2 + [(2, (0.1, 0.1))])
    assert arm.times(4) == (0.1, 0.3) and list(arm.measured) == [4]


def test_a_costly_last_stage_gives_layers_away() -> None:
    assert suggest((0.010, 0.010), [15, 15]) == "15"
    assert suggest((0.010, 0.020), [10, 10]) == "15"
