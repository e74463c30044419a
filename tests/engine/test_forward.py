"""The forward pass gives what transformers (golden models) and llama.cpp (the IQ3_S fixtures) compute in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from strata.engine import numpy_ops
from strata.engine.numpy_ops import NumpyOps
from tests.engine.running import DATA, GOLDEN, MOE, TINY, Stages, ids, pages_for, random_ids, rms

MODELS = [*GOLDEN, TINY, *MOE]
CLOSE = 1e-3
GAP = 0.01


@pytest.fixture(params=MODELS, ids=lambda path: path.stem)
def oracle(request: pytest.FixtureRequest) -> tuple[Path, dict[str, np.ndarray]]:
    path: Path = request.param
    with np.load(path.with_suffix(".npz")) as arrays:
        return path, dict(arrays)


@pytest.mark.parametrize("how", ["rows", "grid", "decode", "deterministic"])
def test_logits_at_every_position(oracle: tuple[Path, dict[str, np.ndarray]], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = oracle
    if how == "grid":
        monkeypatch.setattr(numpy_ops, "short_rows", lambda: 0)
    with Stages(path, NumpyOps(2, deterministic=how == "deterministic")) as stages:
        tokens, pages = ids(expected["ids"]), (5, 2)
        if how == "decode":
            logits = np.concatenate([stages.step((token, position, pages)) for position, token in enumerate(tokens)])
        else:
            logits = stages.read(tokens, pages)
    np.testing.assert_allclose(logits, expected["logits"], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("path", MOE[1:], ids=lambda path: path.stem)
def test_hidden_states_after_the_final_norm(path: Path) -> None:
    with np.load(path.with_suffix(".npz")) as expected, Stages(path, NumpyOps(2), splits=(1, 2)) as stages:
        stages.models[-1].keeps_hidden = True
        stages.read(ids(expected["ids"]), (5, 2))
        np.testing.assert_allclose(stages.models[-1].last_hidden, expected["trunk_hidden"], atol=CLOSE, rtol=0)


def greedy_matches(stages: Stages, prompt: tuple[int, ...], expected: tuple[int, ...], gaps: list[float]) -> bool:
    """Feed the expected tokens; each pick must equal them where the oracle was sure."""
    pages = pages_for(1 + (len(prompt) + len(expected)) // 64, seed=3)
    logits = stages.read(prompt, pages)[-1:]
    for position, (token, gap) in enumerate(zip(expected, gaps, strict=True), start=len(prompt)):
        if gap >= GAP and int(logits.argmax()) != token:
            return False
        logits = stages.step((token, position, pages))
    return True


def test_greedy_continuation(oracle: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, expected = oracle
    with Stages(path, NumpyOps(1)) as stages:
        assert greedy_matches(stages, ids(expected["greedy_prompt"]), ids(expected["greedy"]), expected["greedy_gap"].tolist())


@pytest.mark.parametrize("path", [*GOLDEN, TINY], ids=lambda path: path.stem)
def test_int8_cache_is_as_close_as_llama_cpp_q8_0(path: Path) -> None:
    """llama.cpp's q8_0 KV cache against its f32 one on the dense fixture: logits rms 0.0424 (0.0406 with rotation)."""
    with np.load(path.with_suffix(".npz")) as expected, Stages(path, NumpyOps(1), kind="int8") as stages:
        error = rms(stages.read(ids(expected["ids"]), (5, 2)) - expected["logits"])
    assert 1e-3 < error < 0.05


@pytest.mark.parametrize("path", MOE[:2], ids=lambda path: path.stem)
def test_int8_cache_sends_few_rows_to_other_experts(path: Path) -> None:
    """llama.cpp with a q8_0 cache: rms 0.16 to 0.19 over all rows of such models. Nearly all rows are as close as in a dense one."""
    with np.load(path.with_suffix(".npz")) as expected, Stages(path, NumpyOps(1), kind="int8") as stages:
        difference = stages.read(ids(expected["ids"]), (5, 2)) - expected["logits"]
    errors = np.sort([rms(row) for row in difference])
    assert 1e-3 < errors[len(errors) * 3 // 4] < 0.05
    assert rms(difference) < 0.25


@pytest.mark.parametrize("kind", ["f32", "int8"])
def test_grid_agrees_with_rows_over_several_blocks(kind: str) -> None:
    """The two arithmetics are independent programs for the same mathematics; 700 positions cross blocks, pages and key spans."""
    tokens, pages = random_ids(700), pages_for(11)
    logits = []
    for deterministic in (False, True):
        with Stages(TINY, NumpyOps(2, deterministic), kind=kind) as stages:
            logits.append(stages.read(tokens, pages, chunk=256))
    np.testing.assert_allclose(logits[0], logits[1], atol=CLOSE if kind == "f32" else 0.6, rtol=0)
    assert rms(logits[0] - logits[1]) < (1e-4 if kind == "f32" else 0.02)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_damaged_row_warns_nobody(threads: int) -> None:
    """pytest turns warnings into errors here: infinities and NaN on a row's way must pass silently, in every thread."""
    with Stages(TINY, NumpyOps(threads)) as stages:
        stages.models[0].layers[1].attn_norm[:] = np.inf
        assert np.isnan(stages.read(random_ids(420), tuple(range(7)))).all()
        rows = [(5, 400, tuple(range(7)))] * 20
        assert np.isnan(stages.step(*rows)).all()


def smollm2_cases() -> list[dict]:
    return json.loads((DATA / "smollm2-greedy.json").read_text("utf-8"))


@pytest.mark.parametrize("how", ["rows", "grid"])
def test_smollm2_first_logits(smollm2: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained weights: the best five logits after each prompt, as llama.cpp computes them in float32."""
    if how == "grid":
        monkeypatch.setattr(numpy_ops, "short_rows", lambda: 0)
    with Stages(smollm2, NumpyOps()) as stages:
        for case in smollm2_cases():
            last = stages.read(tuple(case["prompt_ids"]), (0,))[-1]
            top = sorted(((float(value), -token) for token, value in enumerate(last)), reverse=True)[:5]
            assert [-token for _, token in top] == [token for token, _ in case["first_top5"]]
            np.testing.assert_allclose([value for value, _ in top], [value for _, value in case["first_top5"]], atol=CLOSE, rtol=0)


def test_smollm2_greedy(smollm2: Path) -> None:
    with Stages(smollm2, NumpyOps()) as stages:
        for case in smollm2_cases():
            assert greedy_matches(stages, tuple(case["prompt_ids"]), tuple(case["greedy_ids"]), case["greedy_gap"])
