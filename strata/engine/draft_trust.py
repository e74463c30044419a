"""How sure a draft has to be: what its source says of it, corrected by what came of such drafts.

Theory. Checking one more row costs about a tenth of a pass, making its draft less; a draft pays only if it and all before it are accepted
often enough. A head's own probability tells good guesses from bad ones, but what it is worth differs: a well-trained head's guess of
p is accepted about p of the time where tokens are picked greedily and more often where they are drawn with shared noise (0.25 and up), and
an untrained one's figures mean nothing. So guesses are sorted by their probability, greedy and drawn ones apart, and it is counted how
many of each sort were accepted. What a lookup found is sorted by the length of the match (lookup.py).

Rules. Every sort starts as if it had been right PRIOR times, so a source is tried before it is distrusted. Counts are halved at
MOST, so they follow the text. A chain ends before the draft whose chance to be reached and accepted is below ``least``; every RETRY-th such
draft is made nevertheless, or a sort once distrusted would stay so. It ends behind a draft whose chance is below GO_ON: a row is
cheap, and the head's next step, which would be right less often still, is not (docs/LOG.md). Nothing here looks at a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from strata.messages import Segment, SegmentResult, Tokens

LEAST_CHANCE = 0.08
GO_ON = 0.2
PRIOR = 4
MOST = 256
RETRY = 64
SORTS = 16


class Trust:
    """``least``: the chance below which a draft is not made; 0 for every draft."""

    def __init__(self, least: float = LEAST_CHANCE) -> None:
        self.least = least
        self._tried = [0.0] * (2 * SORTS)
        self._right = [0.0] * (2 * SORTS)
        self._refused = [0] * (2 * SORTS)
        self._proposed: dict[int, tuple[str, Tokens, tuple[int, ...]]] = {}

    @staticmethod
    def sort(probability: float, is_drawn: bool) -> int:
        """Two sorts for each halving of the probability, of guesses that are drawn or not."""
        halvings = SORTS - 1 if probability <= 0 else min(SORTS - 1, int(-2 * math.log2(probability)))
        return halvings + SORTS * is_drawn

    def chance(self, sort: int) -> float:
        """How often a guess of this sort is accepted, as far as is known."""
        return (self._right[sort] + PRIOR) / (self._tried[sort] + PRIOR)

    def is_worth(self, chance: float, sort: int) -> bool:
        """Whether to make a draft of this sort, which is reached and accepted with this chance."""
        if chance >= self.least:
            return True
        self._refused[sort] += 1
        return self._refused[sort] % RETRY == 0

    def goes_on(self, chance: float) -> bool:
        """Whether a step is worth taking behind a draft that is reached and accepted with this chance."""
        return chance >= GO_ON or not self.least

    def worth(self, sorts: Sequence[int]) -> int:
        """How many drafts of a chain to make, that would be of these ``sorts``."""
        chance = 1.0
        for count, sort in enumerate(sorts):
            chance *= self.chance(sort)
            if not self.is_worth(chance, sort):
                return count
        return len(sorts)

    def learn(self, sort: int, is_right: bool) -> None:
        """A guess of this sort was checked."""
        self._tried[sort] += 1
        self._right[sort] += is_right
        if self._tried[sort] >= MOST:
            self._tried[sort] /= 2
            self._right[sort] /= 2

    def proposed(self, segment: Segment, drafts: Tokens, sorts: Sequence[int]) -> None:
        """These drafts, and how sure each is, were given to the slot of ``segment``."""
        self._proposed[segment.slot] = segment.request_id, drafts, tuple(sorts)

    def checked(self, segment: Segment, result: SegmentResult) -> None:
        """The slot's next window has run: learn what came of its drafts, as far as they were in it and it was all right."""
        request_id, proposed, sorts = self._proposed.pop(segment.slot, ("", (), ()))
        drafts = segment.tokens[len(segment.tokens) - segment.num_drafts:]
        if result.error or not drafts or segment.request_id != request_id or drafts != proposed[:len(drafts)]:
            return
        for number, sort in enumerate(sorts[:min(result.accepted + 1, len(drafts))]):
            self.learn(sort, number < result.accepted)
