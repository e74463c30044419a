"""Rows of a head: what is certain and waits to be written, and the drafts of a slot as they grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from strata.engine.draft import Ask
from strata.messages import Segment, Tokens

Floats = NDArray[np.float32]
Rows = tuple[Segment, Floats]


def rows_of(segment: Segment, start: int, tokens: Sequence[int], hidden: Sequence[Floats]) -> Rows:
    """Rows of the head for the slot of ``segment``: tokens from position ``start`` on, each with the hidden state before it."""
    return Segment(segment.request_id, segment.slot, start, tuple(tokens), segment.pages), np.concatenate(hidden)


@dataclass(slots=True)
class Kept:
    """What is certain of a request and not in its cells yet: ``tokens`` from position ``first`` on, ``hidden`` of those before them.

    ``segment``: of the window just run, None where the slot was not in it.
    """

    request_id: str
    first: int
    tokens: list[int] = field(default_factory=list)
    hidden: list[Floats] = field(default_factory=list)
    segment: Segment | None = None

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)

    def take(self) -> tuple[int, list[int], list[Floats]]:
        """(first position, tokens, hidden) of all rows, which are kept no longer."""
        taken = self.first, self.tokens, self.hidden
        self.first, self.tokens, self.hidden = self.end, [], []
        return taken


@dataclass(slots=True)
class Chain:
    """An ask and what it got: ``tokens`` are its last pick and up to ``room`` drafts, ``hidden`` of the token before each of them.

    ``sorts``: how sure each draft was; ``chance``: that all of them are accepted.
    """

    ask: Ask
    room: int
    tokens: list[int]
    hidden: list[Floats]
    sorts: list[int] = field(default_factory=list)
    chance: float = 1.0

    @property
    def drafts(self) -> Tokens:
        return tuple(self.tokens[1:])

    def rows(self, start: int) -> Rows:
        """Those from the ``start``-th token on."""
        return rows_of(self.ask.segment, self.ask.position + start, self.tokens[start:], self.hidden[start:])
