"""The committed models' reference values, asked for over HTTP: what llama.cpp and transformers computed for the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.client import Result
from tests.e2e.serving import DATA, SMALLEST_GAP, assert_same, serving

MODELS = [DATA / "tiny" / "llama-iq3s.gguf", *sorted((DATA / "golden").glob("*.gguf"))]


def values(model: Path) -> Any:
    with np.load(model.with_suffix(".npz")) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"kv": "int8"}], ids=str)
@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
async def test_the_greedy_continuation(model: Path, settings: dict[str, Any]) -> None:
    golden = values(model)
    oracle = Result(tokens=golden["greedy"].tolist(), gaps=golden["greedy_gap"].tolist())
    if settings.get("kv") == "int8":
        # Eight bits shift logits by more than float32 does; where the best token leads by this much they change nothing.
        oracle.gaps = [0.0 if gap < 0.5 else gap for gap in oracle.gaps]
    async with serving(model, context=None, **settings) as served:
        result = await served.complete(golden["greedy_prompt"].tolist(), len(oracle.tokens))
    assert_same(result, oracle)


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
async def test_the_logprobs_of_a_prompt(model: Path) -> None:
    """Of its tokens, and of the best one everywhere."""
    golden = values(model)
    ids, logits = golden["ids"].tolist(), golden["logits"].astype(np.float64)
    expected = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(1, keepdims=True)
    async with serving(model, context=None) as served:
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        lists = (await served.post("/v1/completions", body))["choices"][0]["logprobs"]
    of_tokens = lists["token_logprobs"]
    assert of_tokens[0] is None and len(of_tokens) == len(ids) + 1
    np.testing.assert_allclose(of_tokens[1:-1], expected[np.arange(len(ids) - 1), ids[1:]], atol=2e-3)
    np.testing.assert_allclose([max(top.values()) for top in lists["top_logprobs"][1:]], expected.max(1), atol=2e-3)
    gap = np.sort(logits[-1])[-1] - np.sort(logits[-1])[-2]
    assert gap < SMALLEST_GAP or abs(of_tokens[-1] - expected[-1].max()) < 2e-3
