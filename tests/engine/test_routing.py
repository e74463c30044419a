"""Rows go to the experts that a slow, plain twin finds, with its weights: ties, biases and groups included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.architecture import ExpertConfig
from strata.engine.numpy_ops import NumpyOps
from strata.engine.routing import route
from strata.weights.formats import dequantize
from strata.weights.writer import StoredTensor
from tests.engine.drafting import floats, rewritten
from tests.engine.running import Stages, pages_for, random_ids


def config(count: int, used: int, gate: str = "sigmoid", groups: tuple[int, int] = (1, 1), **more: object) -> ExpertConfig:
    given = {"normalised": True, "scale": 1.0, **more}
    return ExpertConfig(count, used, 8, 0, 0, gate, bool(given["normalised"]), float(str(given["scale"])), *groups)


def twin(logits: Sequence[float], bias: Sequence[float], routing: ExpertConfig) -> list[tuple[int, float]]:
    """One row in plain Python: (expert, weight), best first."""
    if routing.gate == "softmax":
        powers = [math.exp(each - max(logits)) for each in logits]
        scores = [power / sum(powers) for power in powers]
    else:
        scores = [1 / (1 + math.exp(-each)) for each in logits]
    keys = [score + offset for score, offset in zip(scores, bias, strict=True)]
    size = routing.count // routing.groups
    members = [range(start, start + size) for start in range(0, routing.count, size)]
    worth = [sum(sorted((keys[expert] for expert in group), reverse=True)[:2]) for group in members]
    open_groups = sorted(range(routing.groups), key=lambda group: (-worth[group], group))[: routing.groups_used]
    allowed = [expert for group in open_groups for expert in members[group]]
    chosen = sorted(allowed, key=lambda expert: (-keys[expert], expert))[: routing.used]
    total = max(sum(scores[expert] for expert in chosen), 2.0**-14) if routing.normalised else 1.0
    return [(expert, scores[expert] / total * routing.scale) for expert in chosen]


@st.composite
def cases(draw: st.DrawFn) -> tuple[ExpertConfig, list[list[float]], list[float] | None]:
    """Outputs and biases of few values, so that ties are common and nothing is nearly a tie."""
    groups = draw(st.integers(1, 4))
    size = draw(st.integers(1, 5))
    groups_used = draw(st.integers(1, groups))
    used = draw(st.integers(1, size * groups_used))
    gate, normalised = draw(st.sampled_from(["softmax", "sigmoid"])), draw(st.booleans())
    routing = config(groups * size, used, gate, (groups, groups_used), normalised=normalised, scale=draw(st.sampled_from([1.0, 2.5])))
    values = st.sampled_from([-3.0, -1.0, 0.0, 0.7, 2.0])
    rows = draw(st.lists(st.lists(values, min_size=routing.count, max_size=routing.count), min_size=1, max_size=5))
    biases = st.lists(st.sampled_from([-0.31, 0.0, 0.17]), min_size=routing.count, max_size=routing.count)
    return routing, rows, draw(st.none() | biases)


@given(cases())
@settings(max_examples=300, deadline=None)
def test_against_the_twin(case: tuple[ExpertConfig, list[list[float]], list[float] | None]) -> None:
    routing, rows, bias = case
    chosen, weights = route(np.array(rows, np.float32), None if bias is None else np.array(bias, np.float32), routing)
    for row, experts, parts in zip(rows, chosen, weights, strict=True):
        expected = twin(row, bias or [0.0] * routing.count, routing)
        assert experts.tolist() == [expert for expert, _ in expected]
        np.testing.assert_allclose(parts, [weight for _, weight in expected], rtol=1e-5)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    plain, _ = route(logits, None, config(4, 2))
    biased, weights = route(logits, np.array([0, 0, 0, 9], np.float32), config(4, 2, normalised=False))
    assert (plain.tolist(), biased.tolist()) == ([[0, 1]], [[3, 0]])
    np.testing.assert_allclose(weights[0], [1 / (1 + math.e), 1 / (1 + math.exp(-2))], rtol=1e-6)


def test_scores_of_nothing_do_not_divide_by_it() -> None:
    """Sigmoids of large negative outputs are 0 in float32."""
    with np.errstate(over="ignore"):
        _, weights = route(np.full((1, 4), -200.0, np.float32), None, config(4, 2))
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("count", [8, 100, 128, 256])
def test_a_row_has_its_own_bits_among_damaged_ones(gate: str, count: int) -> None:
    rng = np.random.default_rng(count)
    logits, bias = rng.standard_normal((9, count)).astype(np.float32), rng.standard_normal(count).astype(np.float32)
    routing = config(count, 8, gate)
    alone = [route(logits[row : row + 1], bias, routing) for row in range(9)]
    for damaged in (False, True):
        if damaged:
            logits[1::2] = np.nan
        with np.errstate(all="ignore"):
            chosen, weights = route(logits, bias, routing)
        for row in range(0, 9, 2):
            np.testing.assert_array_equal(chosen[row], alone[row][0][0])
            np.testing.assert_array_equal(weights[row], alone[row][1][0])
    assert np.isnan(weights[1::2]).all() and (chosen < count).all()


def in_groups(metadata: dict[str, object], tensors: dict[str, StoredTensor]) -> None:
    """Four groups of two experts, of which two are open; a scale; biases that move some rows to other experts."""
    metadata.update({"glm4moe.expert_group_count": 4, "glm4moe.expert_group_used_count": 2, "glm4moe.expert_weights_scale": 2.5})
    rng = np.random.default_rng(8)
    for block in range(1, 4):
        tensors[f"blk.{block}.exp_probs_b.bias"] = floats(rng.uniform(-0.1, 0.1, 8))


def test_blocks_of_the_trunk_route_as_their_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its own router and bias, with the file's groups and scale."""
    seen, plain = [], 0
    with Stages(rewritten("glm4moe-iq3s", tmp_path / "m.gguf", in_groups), NumpyOps(1)) as stages:
        mix = stages.ops.mixture.mix
        monkeypatch.setattr(stages.ops.mixture, "mix", lambda x, *more: (seen.append((x.copy(), *more)), mix(x, *more))[1])
        stages.read(random_ids(20), pages_for(1))
        routers, biases = (
            [dequantize(stages.file.tensors[f"blk.{block}.{name}"]) for block in range(1, 4)]
            for name in ("ffn_gate_inp.weight", "exp_probs_b.bias")
        )
    assert [layer.index for *_, layer in seen] == [0, 1, 2]
    for router, bias, (x, chosen, weights, _) in zip(routers, biases, seen, strict=True):
        logits = x.astype(np.float64) @ router.T
        for row, experts, parts in zip(logits.tolist(), chosen.tolist(), weights, strict=True):
            expected = twin(row, bias.tolist(), config(8, 2, groups=(4, 2), scale=2.5))
            assert experts == [expert for expert, _ in expected]
            np.testing.assert_allclose(parts, [weight for _, weight in expected], rtol=1e-4)
            plain += experts == [expert for expert, _ in twin(row, [0.0] * 8, config(8, 2))]
    assert 0 < plain < 60, "neither biases nor groups would be seen"
