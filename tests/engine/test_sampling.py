"""The draw: greedy, pruning, distribution, independence of rows; drafts; logprobs; rows that are not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine import filters, philox, sampling
from strata.engine.sampling import BROKEN, Row
from strata.request import Sampling


def normal_logits(rows: int, vocab: int, spread: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (rows, vocab)).astype(np.float32)


def full_pick(logits: np.ndarray, row: Row) -> int:
    """The definition: noise for the whole vocabulary, filtered tokens only, no pruning."""
    ids = filters.survivors(logits, row.sampling)
    every = np.arange(len(logits))
    keys = np.array([row.position]), every, np.array([row.sampling.seed]), np.array([row.sampling.choice])
    total = logits.astype(np.float64) / row.sampling.temperature + philox.gumbel(*keys)
    if ids is not None:
        total[np.setdiff1d(every, ids)] = -np.inf
    return int(total.argmax())


def test_greedy_takes_the_lowest_id_of_equal_logits_whatever_the_filters() -> None:
    logits = np.array([[1, 5, 5, 2], [9, 5, 9, 9]], np.float32)
    for settings in (Sampling(temperature=0), Sampling(temperature=0, top_k=2, top_p=0.1, min_p=0.5, seed=3), Sampling(temperature=1e-6)):
        assert sampling.pick(logits, [Row(settings, 7), Row(settings, 8)]) == [1, 0]


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0])
def test_pruned_picks_equal_those_of_the_whole_vocabulary(spread: float, temperature: float) -> None:
    logits = normal_logits(8, 20_000, spread)
    for settings in ({}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02, "top_p": 0.99}):
        rows = [Row(Sampling(temperature=temperature, seed=2**40 + i, choice=i % 3, **settings), 100 + i) for i in range(8)]
        assert sampling.pick(logits, rows) == [full_pick(logits[i], rows[i]) for i in range(8)]


def test_pruning_holds_for_the_largest_noise() -> None:
    """A token is skipped only if even the best possible noise could not make it win; the bound is tried from both sides."""
    values = np.array([10.0, 0.0], np.float32)
    for temperature in (0.3, 1.0):
        just_reached = 0.0 / temperature + philox.NOISE_MAX
        assert sampling.reachable(values, just_reached, temperature).tolist() == [0, 1]
        assert sampling.reachable(values, just_reached * 1.001, temperature).tolist() == [0]


def test_a_row_does_not_see_its_neighbours() -> None:
    logits = normal_logits(9, 5_000, 4.0)
    many = [Sampling(), Sampling(temperature=0), Sampling(temperature=0.7, top_p=0.9), Sampling(top_k=5), Sampling(min_p=0.1),
            Sampling(temperature=2.0), Sampling(logit_bias=((3, 50.0),)), Sampling(presence_penalty=1.0), Sampling(seed=2**62)]
    rows = [Row(settings, 50 + i, np.array([1, 2]), [4, 5]) for i, settings in enumerate(many)]
    alone = [sampling.pick(logits[i:i + 1], [rows[i]])[0] for i in range(9)]
    assert sampling.pick(logits, rows) == alone
    order = [4, 0, 8, 2, 6, 1, 3, 7, 5]
    assert sampling.pick(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]


def test_seed_choice_and_position_each_change_the_draw() -> None:
    logits = normal_logits(1, 1000, 0.1)
    base = sampling.pick(logits, [Row(Sampling(seed=1), 10)])
    others = [Row(Sampling(seed=2), 10), Row(Sampling(seed=1 + 2**32), 10), Row(Sampling(seed=1, choice=1), 10), Row(Sampling(seed=1), 11)]
    assert all(sampling.pick(logits, [row]) != base for row in others)
    assert sampling.pick(logits, [Row(Sampling(seed=1), 10)]) == base


@pytest.mark.parametrize("vary", ["position", "seed", "choice", "seed_high"])
def test_draws_follow_the_softmax_of_logit_over_temperature(vary: str) -> None:
    """Chi-square with 7 degrees of freedom; 24.3 is the 0.1 % point. Each part of key and counter must give independent draws."""
    temperature, draws = 0.8, 8000
    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5], np.float32)
    rows = []
    for i in range(draws):
        seed = {"seed": i, "seed_high": i << 32}.get(vary, 99)
        rows.append(Row(Sampling(temperature=temperature, seed=seed, choice=i if vary == "choice" else 0), i if vary == "position" else 5))
    counts = np.bincount(sampling.pick(np.broadcast_to(logits, (draws, 8)), rows), minlength=8)
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = draws * weights / weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_filtered_draws_follow_the_softmax_of_what_is_left() -> None:
    """Chi-square with 3 degrees of freedom; 16.3 is the 0.1 % point."""
    draws = 6000
    logits = np.array([0.0, 2.0, 1.5, -3.0, 1.0, 0.5, -9.0], np.float32)
    rows = [Row(Sampling(temperature=1.3, top_k=4, seed=i), 9) for i in range(draws)]
    counts = np.bincount(sampling.pick(np.broadcast_to(logits, (draws, 7)), rows), minlength=7)
    kept = [1, 2, 4, 5]
    weights = np.exp(logits[kept].astype(np.float64) / 1.3)
    expected = draws * weights / weights.sum()
    assert counts.sum() == counts[kept].sum()
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 16.3


@pytest.mark.parametrize(
    "settings", [Sampling(), Sampling(temperature=0), Sampling(top_p=0.9), Sampling(top_k=3), Sampling(presence_penalty=1)]
)
def test_a_row_without_a_finite_maximum_fails_alone(settings: Sampling) -> None:
    logits = normal_logits(5, 100, 2.0)
    logits[1, 40] = np.nan
    logits[2] = -np.inf
    logits[3, 99] = np.inf
    rows = [Row(settings, i, generated=[3]) for i in range(5)]
    picks = sampling.pick(logits, rows)
    assert picks[1:4] == [BROKEN] * 3
    assert [picks[0], picks[4]] == sampling.pick(logits[[0, 4]], [rows[0], rows[4]])


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full((50, 300), -np.inf, np.float32)
    logits[:, [7, 250]] = 0.0
    picks = sampling.pick(logits, [Row(Sampling(temperature=100.0, top_p=0.9999, seed=i), 3) for i in range(50)])
    assert set(picks) == {7, 250}


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_drafts_are_accepted_while_they_equal_the_picks(drafts: list[int], picks: list[int]) -> None:
    count = sampling.accepted(drafts, picks)
    assert drafts[:count] == picks[:count]
    assert count == len(drafts) or drafts[count] != picks[count]


def test_logprobs_are_the_log_softmax_of_raw_logits() -> None:
    logits = normal_logits(1, 3000, 5.0)[0]
    logits[[10, 2000]] = logits.max() + 1.0
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    found = sampling.token_logprob(logits, 17, 5)
    assert found.token == 17 and found.logprob == pytest.approx(exact[17], abs=1e-9)
    assert [token for token, _ in found.top[:2]] == [10, 2000], "equal logits: the lowest id first"
    assert [token for token, _ in found.top] == sorted(range(3000), key=lambda token: (-logits[token], token))[:5]
    assert [value for _, value in found.top] == pytest.approx([exact[token] for token, _ in found.top], abs=1e-9)
    assert all(value <= 0 for _, value in found.top)


def test_logprobs_of_every_token_sum_to_one() -> None:
    found = sampling.token_logprob(normal_logits(1, 40, 3.0)[0], 0, 100)
    assert len(found.top) == 40
    assert math.fsum(math.exp(value) for _, value in found.top) == pytest.approx(1.0, abs=1e-12)
    assert sampling.token_logprob(np.zeros(4, np.float32), 2, 0).top == ()
