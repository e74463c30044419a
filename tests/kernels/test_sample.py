"""Picks and logprobs on the device against the CPU engine's sampling, which is tested on its own."""

import numpy as np
import pytest

from strata.engine.sampling import Row, pick, token_logprob
from strata.kernels.sample import History, choices_of, logprobs, put_choices, sample
from strata.request import Sampling

pytestmark = pytest.mark.cxx
VOCAB = 1700


def device_picks(bench, logits, rows):
    choices = put_choices(bench.device, choices_of(rows, logits.shape[1]), bench.stream)
    given, scratch, picks = bench.put(logits), bench.empty(logits.shape), bench.empty((len(rows),), np.int32)
    sample(bench.device, given, scratch, choices, picks, bench.stream)
    np.testing.assert_array_equal(bench.get(given), logits)
    return bench.get(picks).tolist()


def twin_picks(logits, rows):
    return pick(logits, [Row(s, position, np.unique(np.array(h.prompt, np.int64)), h.generated) for s, position, h in rows])


def random_sampling(rng, number):
    """Every filter alone, and all together."""
    one = [
        {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_k": 40, "temperature": 1.5}, {"top_p": 0.9},
        {"top_p": 0.3, "temperature": 2.0}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02}, {"top_k": 1}, {"top_p": 1e-9},
        {"top_k": VOCAB}, {"top_k": 300, "top_p": 0.999}, {"temperature": 1e-6},
    ][number % 13]  # fmt: skip
    return Sampling(**{"seed": int(rng.integers(2**63)), "choice": int(rng.integers(4)), **one})


def test_picks_are_the_cpus(bench, rng):
    rows = [(random_sampling(rng, n), int(rng.integers(1, 300000)), History()) for n in range(39)]
    logits = (rng.standard_normal((39, VOCAB)) * rng.choice([0.5, 3, 8], (39, 1))).astype(np.float32)
    assert device_picks(bench, logits, rows) == twin_picks(logits, rows)


def test_equal_logits_are_ordered_by_id(one_bench, rng):
    """Few distinct values: every cut goes through ties."""
    logits = rng.integers(-3, 3, (26, VOCAB)).astype(np.float32)
    logits[:, 7] = -0.0
    rows = [(random_sampling(rng, n), n + 5, History()) for n in range(26)]
    assert device_picks(one_bench, logits, rows) == twin_picks(logits, rows)


def test_bias_and_penalties_change_the_choice_as_on_the_cpu(one_bench, rng):
    rows = []
    for n in range(24):
        sampling = Sampling(
            temperature=[0.0, 0.8][n % 2], seed=n, repetition_penalty=[1.0, 1.3][n // 2 % 2], presence_penalty=[0.0, 0.9, -0.5][n % 3],
            frequency_penalty=[0.0, 0.4][n // 3 % 2], logit_bias=[(), ((3, 9.5), (VOCAB + 5, 99.0), (8, -100.0))][n // 4 % 2],
        )  # fmt: skip
        rows.append((sampling, 50 + n, History(rng.integers(0, 40, 30).tolist(), rng.integers(0, 40, 60).tolist())))
    logits = rng.standard_normal((24, VOCAB)).astype(np.float32)
    logits[:, :40] += 4
    got = device_picks(one_bench, logits, rows)
    assert got == twin_picks(logits, rows)
    assert got != twin_picks(logits, [(sampling, position, History()) for sampling, position, _ in rows])


def test_broken_rows_are_reported_and_their_neighbours_are_not_touched(bench, rng):
    logits = rng.standard_normal((6, 300)).astype(np.float32)
    rows = [(Sampling(seed=n, top_p=0.9), n, History()) for n in range(6)]
    alone = [device_picks(bench, logits[n : n + 1], rows[n : n + 1])[0] for n in range(6)]
    logits[1, 299], logits[3, 0], logits[4] = np.nan, np.inf, -np.inf
    logits[5, 1:250] = -np.inf
    got = device_picks(bench, logits, rows)
    assert [got[n] for n in (0, 2)] == [alone[0], alone[2]] and [got[n] for n in (1, 3, 4)] == [-1] * 3
    assert got[5] == twin_picks(logits[5:], rows[5:])[0]


def test_draws_follow_the_distribution(one_bench):
    """2000 positions of one request: the frequencies of three tokens are within five standard deviations."""
    odds = np.array([0.6, 0.3, 0.1])
    logits = np.full((2000, 3), 1, np.float32) * np.log(odds).astype(np.float32)
    rows = [(Sampling(seed=11), position, History()) for position in range(2000)]
    counts = np.bincount(device_picks(one_bench, logits, rows), minlength=3)
    assert (np.abs(counts - 2000 * odds) < 5 * np.sqrt(2000 * odds * (1 - odds))).all()


def test_logprobs_are_the_cpus(bench, rng):
    logits = np.round(rng.standard_normal((5, VOCAB)), 1).astype(np.float32)  # with ties
    tokens, counts = np.array([3, 0, 1699, 5, -1], np.int32), np.array([0, 1, 5, 20, 20], np.int32)
    chosen, ids, tops = bench.empty((5,), np.float64), bench.empty((5, 20), np.int32), bench.empty((5, 20), np.float64)
    logprobs(bench.device, bench.put(logits), bench.put(tokens), bench.put(counts), (chosen, ids, tops), bench.stream)
    chosen, ids, tops = (bench.get(x) for x in (chosen, ids, tops))
    for row in range(5):
        wanted = token_logprob(logits[row], int(max(tokens[row], 0)), int(counts[row]))
        assert row == 4 or abs(chosen[row] - wanted.logprob) < 1e-12
        assert ids[row, : counts[row]].tolist() == [token for token, _ in wanted.top]
        np.testing.assert_allclose(tops[row, : counts[row]], [logprob for _, logprob in wanted.top], atol=1e-12)
    assert np.isnan(chosen[4])  # nothing was asked for, nothing was written
