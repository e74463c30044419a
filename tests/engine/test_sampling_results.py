"""Results of whole windows: which logits belong to which segment, drafts, logprobs, penalties, rows that fail alone."""

from __future__ import annotations

import numpy as np
import pytest

from strata.engine import sampling
from strata.engine.results import NOT_FINITE, PROMPTS_KEPT, Sampler
from strata.engine.rows import wanted_rows
from strata.messages import Segment, SegmentResult, Window
from strata.request import Sampling

VOCAB = 50
GREEDY = Sampling(temperature=0)


def decode(*segments: Segment) -> Window:
    return Window(1, "decode", 0, segments)


def segment(slot: int, tokens: tuple[int, ...], settings: Sampling | None = GREEDY, start: int = 10, **more) -> Segment:
    return Segment(f"r{slot}", slot, start, tokens, (0,), settings, **more)


def peaks(*tokens: int) -> np.ndarray:
    """Logits whose best token is known, row by row."""
    logits = np.random.default_rng(3).normal(0, 1, (len(tokens), VOCAB)).astype(np.float32)
    logits[np.arange(len(tokens)), list(tokens)] = 9.0
    return logits


def test_each_segment_gets_the_pick_of_its_own_row() -> None:
    window = decode(segment(0, (1,)), segment(3, (2,)), segment(1, (3,)))
    results = Sampler()(window, peaks(20, 30, 40))
    assert [result.picks for result in results] == [(20,), (30,), (40,)]
    assert all(result == SegmentResult(picks=result.picks) for result in results)


def test_a_part_of_a_prompt_picks_nothing_and_its_end_picks_one() -> None:
    part = Window(1, "prompt", 0, (segment(0, (1, 2, 3), None, start=0),))
    assert list(wanted_rows(part)) == []
    assert Sampler()(part, np.empty((0, VOCAB), np.float32)) == (SegmentResult(),)
    end = Window(2, "prompt", 0, (segment(0, (4, 5), start=3),))
    assert Sampler()(end, peaks(7)) == (SegmentResult(picks=(7,)),)


@pytest.mark.parametrize("best, picks, accepted", [((8, 9, 5), (8, 9, 5), 2), ((8, 4, 5), (8, 4), 1), ((7, 9, 5), (7,), 0)])
def test_drafts_are_kept_while_they_are_the_picks(best: tuple[int, ...], picks: tuple[int, ...], accepted: int) -> None:
    window = decode(segment(0, (1,)), segment(1, (3, 8, 9), num_drafts=2), segment(2, (2,)))
    results = Sampler()(window, peaks(20, *best, 40))
    assert results[1] == SegmentResult(picks=picks, accepted=accepted)
    assert [results[0].picks, results[2].picks] == [(20,), (40,)]


def test_seeded_picks_are_the_same_with_and_without_drafts() -> None:
    """Whatever is drafted, the tokens are those of one row at a time."""
    settings = Sampling(temperature=1.0, seed=11, presence_penalty=0.8, repetition_penalty=1.2, frequency_penalty=0.3)
    logits = np.random.default_rng(1).normal(0, 2, (4, VOCAB)).astype(np.float32)
    prompt, generated, alone = (1, 2, 3), [4], []
    for row in range(4):
        last = generated[-1]
        history = (prompt, tuple(generated))
        result, = Sampler()(decode(segment(0, (last,), settings, start=10 + row, history=history)), logits[row:row + 1])
        alone.append(result.picks[0])
        generated.append(result.picks[0])
    right = segment(0, (4, *alone[:3]), settings, num_drafts=3, history=(prompt, (4,)))
    assert Sampler()(decode(right), logits)[0].picks == tuple(alone)
    wrong = segment(0, (4, alone[0], (alone[1] + 1) % VOCAB, alone[2]), settings, num_drafts=3, history=(prompt, (4,)))
    assert Sampler()(decode(wrong), logits)[0].picks == tuple(alone[:2])


def test_logprobs_go_with_the_picks_that_are_kept() -> None:
    logits = peaks(20, 8, 4, 5)
    window = decode(segment(0, (1,)), segment(1, (3, 8, 9), Sampling(temperature=0, logprobs=2, logit_bias=((8, 100.0),)), num_drafts=2))
    plain, found = Sampler()(window, logits)
    assert plain.logprobs == () and found.picks == (8, 8)
    assert found.logprobs == tuple(sampling.token_logprob(logits[1 + i], 8, 2) for i in range(2)), "of the raw logits, without the bias"


def test_prompt_logprobs_report_the_token_after_each_row_across_chunks() -> None:
    tokens = (5, 6, 7, 8, 9)
    logits = np.random.default_rng(2).normal(0, 2, (5, VOCAB)).astype(np.float32)
    sampler = Sampler()
    first = Window(1, "prompt", 0, (segment(0, tokens[:3], None, start=0, prompt_logprobs=1, next_token=8),))
    second = Window(2, "prompt", 0, (segment(0, tokens[3:], start=3, prompt_logprobs=1),))
    found = sampler(first, logits[:3])[0].prompt_logprobs + sampler(second, logits[3:])[0].prompt_logprobs
    assert found == tuple(sampling.token_logprob(logits[i], tokens[i + 1], 1) for i in range(4))
    assert sampler(second, logits[3:])[0].picks == (int(logits[4].argmax()),)


def test_a_broken_row_fails_its_segment_alone() -> None:
    window = decode(segment(0, (1,)), segment(1, (2,)), segment(2, (3,)))
    logits = peaks(20, 30, 40)
    logits[1, 3] = np.nan
    assert Sampler()(window, logits) == (SegmentResult(picks=(20,)), SegmentResult(error=NOT_FINITE), SegmentResult(picks=(40,)))


def test_a_broken_row_behind_a_rejected_draft_does_no_harm() -> None:
    logits = peaks(8, 4, 5)
    logits[2] = np.nan
    rejected, = Sampler()(decode(segment(0, (1, 8, 9), num_drafts=2)), logits)
    assert rejected == SegmentResult(picks=(8, 4), accepted=1)
    reached, = Sampler()(decode(segment(0, (1, 8, 4), num_drafts=2)), logits)
    assert reached == SegmentResult(error=NOT_FINITE)


def test_a_broken_row_of_a_prompt_with_logprobs_is_an_error() -> None:
    logits = peaks(1, 2)
    logits[0, 0] = np.inf
    window = Window(1, "prompt", 0, (segment(0, (5, 6), None, prompt_logprobs=0, next_token=7),))
    assert Sampler()(window, logits) == (SegmentResult(error=NOT_FINITE),)


def test_the_memo_of_prompts_never_mixes_two_prompts() -> None:
    """More prompts than are kept, many of them dead, so that Python gives their memory to others."""
    settings = Sampling(temperature=0, repetition_penalty=1e6)
    sampler = Sampler()
    for turn in range(5 * PROMPTS_KEPT):
        prompt = tuple(range(turn % 7, turn % 7 + 3))
        window = decode(segment(0, (0,), settings, history=(prompt, ())))
        logits = np.full((1, VOCAB), 1.0, np.float32)
        expected = min(set(range(VOCAB)) - set(prompt))
        assert sampler(window, logits)[0].picks == (expected,)
