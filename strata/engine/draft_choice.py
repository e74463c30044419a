"""Which token a head drafts, given its logits: the one that the target would pick from them.

Rules. The choice is the target's own (sampling.py): same bias, penalties, filters, temperature and noise, for the same position. The noise
of a token depends on position and token alone, so where head and target agree roughly on the distribution they mostly draw the same
token (a Gumbel coupling; see docs/LOG.md for what that is worth). A head may run over a part of the vocabulary (draft_vocab.py): other
tokens are as if impossible.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.engine import sampling
from strata.engine.draft import Ask
from strata.engine.draft_vocab import DraftVocabulary
from strata.engine.results import DistinctTokens
from strata.engine.sampling import Row, Spread

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class DraftChoice:
    """``vocabulary``: the tokens that have a logit; None for all ``vocab_size`` of them."""

    def __init__(self, vocabulary: DraftVocabulary | None, vocab_size: int, spread: Spread = map) -> None:
        self.vocabulary = vocabulary
        self._vocab_size, self._spread = vocab_size, spread
        self._distinct = DistinctTokens()

    def __call__(self, logits: Floats, asks: Sequence[tuple[Ask, Sequence[int]]]) -> list[tuple[int, float]]:
        """(token, the head's probability of it) for each ask and its drafts so far; ``logits`` [asks, vocabulary].

        The probability is that of the plain logits, before filters and temperature; 0 (and the token ``sampling.BROKEN``) where they are
        not finite.
        """
        rows = [self._row(ask, drafts) for ask, drafts in asks]
        known = self.vocabulary
        if all(is_plain(row) for row in rows):
            places = logits.argmax(axis=1)
            tokens = places if known is None else known.ids[places]
        else:
            whole = logits if known is None else self._spread_out(logits, known.ids)
            tokens = np.array(sampling.pick(whole, rows, self._spread), np.int64)
            places = tokens if known is None else np.where(tokens < 0, tokens, known.place_of[tokens])
        found = probabilities(logits, places)
        return list(zip(np.where(found > 0, tokens, sampling.BROKEN).tolist(), found.tolist(), strict=True))

    def _row(self, ask: Ask, drafts: Sequence[int]) -> Row:
        segment, position = ask.segment, ask.position + 1 + len(drafts)
        assert segment.sampling is not None
        if segment.history is None or not segment.sampling.has_penalties:
            return Row(segment.sampling, position)
        prompt, generated = segment.history
        return Row(segment.sampling, position, self._distinct(prompt), [*generated, *ask.picks, *drafts])

    def _spread_out(self, logits: Floats, ids: Ids) -> Floats:
        whole = np.full((len(logits), self._vocab_size), -np.inf, np.float32)
        whole[:, ids] = logits
        return whole


def is_plain(row: Row) -> bool:
    """Whether the likeliest token is what is picked."""
    return row.sampling.temperature < sampling.GREEDY_BELOW and not row.sampling.logit_bias and not row.sampling.has_penalties


def probabilities(logits: Floats, places: Ids) -> Floats:
    """The softmax of each row at its place, float32 [rows]; 0 for a row that holds NaN or infinities, and for ``sampling.BROKEN``."""
    best = logits.max(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        weights = np.exp(logits - best)
        found = np.take_along_axis(weights, np.maximum(places, 0)[:, None], axis=1)[:, 0] / weights.sum(axis=1)
    return np.where(np.isfinite(best[:, 0]) & (places >= 0), found, 0)
