"""The head's choice is the target's, over the tokens that the head knows."""

from __future__ import annotations

import numpy as np
import pytest

from strata.engine import sampling
from strata.engine.draft import Ask
from strata.engine.draft_choice import DraftChoice
from strata.engine.draft_vocab import DraftVocabulary
from strata.engine.sampling import Row
from strata.messages import Segment, Tokens
from strata.request import Sampling

VOCAB = 300
KNOWN = np.arange(1, VOCAB, 3)[::-1]  # the order is that of frequency
PLAIN = Sampling(temperature=0)
SETTINGS = [
    PLAIN,
    Sampling(seed=5),
    Sampling(seed=6, temperature=0.7, top_k=20),
    Sampling(seed=7, choice=2, temperature=1.3, top_p=0.8, min_p=0.01),
    Sampling(temperature=0, repetition_penalty=3.0, frequency_penalty=1.0, presence_penalty=0.5),
    Sampling(seed=8, logit_bias=((4, 9.0), (2, 50.0), (7, -9.0)), frequency_penalty=0.4),
]
PROMPT: Tokens = (4, 7, 7, 10)


def ask(settings: Sampling, start: int = 20, picks: Tokens = (31, 34)) -> Ask:
    """A segment of a token and one draft, which was accepted."""
    return Ask(Segment("r", 0, start, (28, 31), (0,), settings, 1, (PROMPT, [13, 28])), picks, 3)


def row(settings: Sampling, position: int, generated: list[int]) -> Row:
    return Row(settings, position, np.unique(PROMPT), generated) if settings.has_penalties else Row(settings, position)


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
@pytest.mark.parametrize("known", [None, KNOWN], ids=["all", "some"])
def test_it_picks_what_the_target_would(known: np.ndarray | None, settings: Sampling) -> None:
    """Ranks, filters and noise are those of the whole vocabulary in which unknown tokens are impossible."""
    logits = np.random.default_rng(2).normal(0, 3, (3, VOCAB)).astype(np.float32)
    drafts: list[Tokens] = [(), (40,), (40, 4)]
    logits[1, 40], logits[2, 4] = 11, 12  # unless what is drafted already is penalised
    whole = logits.copy()
    if known is not None:
        whole[:, np.setdiff1d(np.arange(VOCAB), known)] = -np.inf
    wanted = sampling.pick(whole, [row(settings, 23 + len(each), [13, 28, 31, 34, *each]) for each in drafts])
    vocabulary = None if known is None else DraftVocabulary(known, VOCAB)
    found = DraftChoice(vocabulary, VOCAB)(logits if known is None else logits[:, known], [(ask(settings), each) for each in drafts])
    assert [token for token, _ in found] == wanted
    softmax = np.exp(whole.astype(np.float64)) / np.exp(whole.astype(np.float64)).sum(axis=1, keepdims=True)
    assert [chance for _, chance in found] == pytest.approx([softmax[at, token] for at, token in enumerate(wanted)], rel=1e-4)


@pytest.mark.parametrize("settings", SETTINGS[:2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_damaged_row_drafts_nothing(settings: Sampling, bad: float) -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 9], logits[1, 10] = bad, 5
    found = DraftChoice(None, VOCAB)(logits, [(ask(settings), ()), (ask(PLAIN), ())])
    assert found[0] == (sampling.BROKEN, 0) and found[1][0] == 10
