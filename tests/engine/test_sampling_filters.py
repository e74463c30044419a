"""Filters and penalties against a slow twin that sorts everything and works token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine import filters
from strata.request import Sampling

# Few distinct values, so that ties are the rule; -inf as masked tokens have it.
value = st.one_of(st.integers(-12, 12).map(lambda n: n / 2), st.floats(-30, 30, width=32), st.just(-np.inf))
rows = st.lists(value, min_size=1, max_size=60).filter(lambda row: max(row) > -np.inf).map(lambda row: np.array(row, np.float32))
samplings = st.builds(
    Sampling,
    top_k=st.integers(0, 70),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)


def slow_survivors(logits: np.ndarray, sampling: Sampling) -> list[int]:
    """Sort all tokens once, then cut the sorted list three times."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if 0 < sampling.top_k:
        order = order[: sampling.top_k]
    weights = [float(np.exp(logits[token] - logits[order[0]])) for token in order]
    if sampling.top_p < 1:
        wanted = sampling.top_p * float(np.exp(logits[sorted(order)] - logits[order[0]]).sum(dtype=np.float64))
        total, kept = 0.0, 0
        while kept < len(order) and (kept == 0 or total < wanted):
            total += weights[kept]
            kept += 1
        order = order[:kept]
    if sampling.min_p > 0:
        order = [token for token in order if logits[token] >= logits[order[0]] + np.float32(np.log(sampling.min_p))]
    return sorted(order)


@settings(max_examples=200)
@given(rows, samplings)
def test_survivors_equal_the_sorting_twin(logits: np.ndarray, sampling: Sampling) -> None:
    found = filters.survivors(logits, sampling)
    expected = slow_survivors(logits, sampling)
    assert (list(range(len(logits))) if found is None else found.tolist()) == expected


@pytest.mark.parametrize("spread", [0.1, 2.0, 10.0])
@pytest.mark.parametrize("sampling", [Sampling(top_k=40), Sampling(top_p=0.9), Sampling(top_p=0.999999), Sampling(min_p=0.05),
                                      Sampling(top_k=500, top_p=0.95, min_p=0.01)])
def test_survivors_of_a_large_vocabulary(spread: float, sampling: Sampling) -> None:
    """Flat and peaked rows take different ways through the nucleus; both give the twin's set."""
    logits = (np.random.default_rng(5).normal(0, spread, 20_000)).astype(np.float32)
    found = filters.survivors(logits, sampling)
    assert found is not None and found.tolist() == slow_survivors(logits, sampling)


def test_top_k_keeps_the_lowest_ids_of_equal_logits() -> None:
    assert filters.top_k(np.array([1, 3, 2, 2, 2, 0], np.float32), 3).tolist() == [1, 2, 3]


def test_top_p_keeps_at_least_one_and_the_token_that_reaches_the_mass() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    assert filters.top_p(logits, None, 1e-9).tolist() == [0]
    assert filters.top_p(logits, None, 0.5).tolist() == [0]
    assert filters.top_p(logits, None, 0.51).tolist() == [0, 1]
    assert filters.top_p(logits, np.array([2, 3]), 0.5).tolist() == [2], "the mass is that of the tokens top_k left"


def test_filters_do_not_depend_on_the_temperature() -> None:
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    for temperature in (0.1, 1.0, 5.0):
        found = filters.survivors(logits, Sampling(temperature=temperature, top_p=0.7, min_p=0.2))
        assert found is not None and found.tolist() == [0, 1]


tokens = st.lists(st.integers(0, 19), max_size=30)


@given(st.lists(st.floats(-20, 20, width=32), min_size=20, max_size=20), tokens, tokens,
       st.floats(-2, 2), st.floats(-2, 2), st.floats(0.1, 3), st.lists(st.tuples(st.integers(0, 25), st.floats(-100, 100)), max_size=4))
def test_penalties_equal_the_slow_twin(row, prompt, generated, presence, frequency, repetition, bias) -> None:
    sampling = Sampling(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, logit_bias=tuple(bias))
    logits = np.array(row, np.float32)
    found = filters.adjusted(logits, sampling, np.unique(np.array(prompt, np.int64)), generated)
    for token in range(20):
        expected = float(row[token]) + sum(amount for biased, amount in bias if biased == token)
        if token in prompt or token in generated:
            expected = expected / repetition if expected > 0 else expected * repetition
        expected -= frequency * generated.count(token) + presence * (token in generated)
        assert found[token] == pytest.approx(expected, rel=1e-5, abs=1e-4)
    assert logits.tolist() == np.array(row, np.float32).tolist(), "the raw logits are still needed for logprobs"


def test_presence_and_frequency_leave_prompt_tokens_alone() -> None:
    sampling = Sampling(presence_penalty=1.0, frequency_penalty=0.5)
    found = filters.adjusted(np.zeros(4, np.float32), sampling, np.array([0, 1]), [1, 2, 2])
    assert found.tolist() == [0.0, -1.5, -2.0, 0.0]
