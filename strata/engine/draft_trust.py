"""How sure a head's guess has to be: what it says of itself, corrected by what came of it.

Theory. Checking one more row costs about a tenth of a pass, making its draft less; a draft pays only if it and all before it are accepted
often enough. The head's own probability tells good guesses from bad ones, but what it is worth differs: a well-trained head's guess of
p is accepted about p of the time where tokens are picked greedily and more often where they are drawn with shared noise (0.25 and up), and
an untrained one's figures mean nothing. So guesses are sorted by their probability, greedy and drawn ones apart, and it is counted how
many of each sort were accepted.

Rules. Every sort starts as if it had been right PRIOR times, so a head is tried before it is distrusted. Counts are halved at
MOST, so they follow the text. A chain ends before the draft whose chance to be reached and accepted is below ``least``; every RETRY-th such
draft is made nevertheless, or a sort once distrusted would stay so. Nothing here looks at a clock.
"""

from __future__ import annotations

import math

LEAST_CHANCE = 0.12
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

    def learn(self, sort: int, is_right: bool) -> None:
        """A guess of this sort was checked."""
        self._tried[sort] += 1
        self._right[sort] += is_right
        if self._tried[sort] >= MOST:
            self._tried[sort] /= 2
            self._right[sort] /= 2
