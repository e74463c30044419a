"""Drafting: after each window, guesses at the tokens that follow what it picked, for the next window to check.

Theory (Leviathan et al. 2023; for heads Gloeckle et al. 2024). One pass over a few rows costs little more than over one, so a slot's
next window checks some guessed tokens beside its own; those that equal the model's own picks are kept. Guesses cost speed at worst,
never a token.

Two sources behind one interface: the continuation of an earlier occurrence in the slot's own text (lookup.py), which is free, and the
model's head for it (mtp.py). The first that finds something serves the slot. How many drafts are wanted at most is said by each segment;
here is decided what they are, and which are too unlikely to be worth a row (draft_trust.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from strata.engine.sampling import GREEDY_BELOW
from strata.messages import DraftSource, Segment, SegmentResult, Tokens, Window

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Ask:
    """A segment whose slot wants up to ``limit`` drafts behind ``picks[-1]``."""

    segment: Segment
    picks: Tokens
    limit: int

    @property
    def position(self) -> int:
        """Of the last pick: where the next window's first row will be."""
        return self.segment.end - self.segment.num_drafts + len(self.picks) - 1

    @property
    def is_drawn(self) -> bool:
        """Whether its tokens are drawn at random."""
        sampling = self.segment.sampling
        return sampling is not None and sampling.temperature >= GREEDY_BELOW


class Source(Protocol):
    """Somebody who drafts. ``name`` is also the field of DraftLimits that says how many drafts it may give."""

    name: DraftSource

    def observe(self, window: Window, results: Sequence[SegmentResult]) -> None:
        """A window has run; called for every one, in order, before anything is proposed."""

    def propose(self, asks: Sequence[Ask]) -> list[Tokens]:
        """Drafts for each ask, none to ``limit`` of them; called once a window, perhaps with no asks."""


class Drafter:
    """Asks ``sources`` in turn. Runs on the last stage's thread."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)

    @property
    def sources(self) -> tuple[DraftSource, ...]:
        return tuple(source.name for source in self._sources)

    def __call__(self, window: Window, results: tuple[SegmentResult, ...]) -> tuple[SegmentResult, ...]:
        """``results`` with drafts."""
        drafted = list(results)
        for source in self._sources:
            source.observe(window, results)
        for source in self._sources:
            asks = []
            for index, (segment, result) in enumerate(zip(window.segments, drafted)):
                limit = getattr(segment.draft_limits, source.name)
                if limit > 0 and result.picks and not result.drafts:
                    asks.append((index, Ask(segment, result.picks, limit)))
            for (index, _), drafts in zip(asks, source.propose([ask for _, ask in asks]), strict=True):
                if drafts:
                    drafted[index] = replace(drafted[index], drafts=drafts, draft_source=source.name)
        return tuple(drafted)
