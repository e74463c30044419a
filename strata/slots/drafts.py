"""The drafts of one run: what its last window gave, until its next one checks it, and how such drafts fared so far."""

from __future__ import annotations

from strata.messages import NO_DRAFTS, DraftLimits, DraftSource, SegmentResult, Tokens
from strata.slots.drafting import Tally


class Drafts:
    """``tokens``, by ``source``: for the next window. ``wanted``: the choice, None before the first. ``mtp``, ``lookup``: how each fared.

    ``flying``: whose drafts the window in flight checks. ``windows``: how many windows have checked any.
    """

    __slots__ = ("tokens", "source", "flying", "wanted", "windows", "mtp", "lookup", "_asked", "_given")

    def __init__(self, depth: int) -> None:
        self.tokens: Tokens = ()
        self.source: DraftSource = ""
        self.flying: DraftSource = ""
        self.wanted: DraftLimits | None = None
        self.windows = 0
        self.mtp = Tally(depth)
        self.lookup = Tally(depth)
        self._asked = NO_DRAFTS
        self._given = 0

    def carry(self, asked: DraftLimits, result: SegmentResult) -> None:
        """What a window gave is what the next one may check; never more than was asked for."""
        limit = asked.lookup if result.draft_source == "lookup" else asked.mtp
        self.tokens = result.drafts if len(result.drafts) <= limit else result.drafts[:limit]
        self.source = result.draft_source if self.tokens else ""
        self._asked, self._given = asked, len(self.tokens)

    def drop(self) -> None:
        """Nothing to check, nothing to learn."""
        self.tokens, self.source, self._asked = (), "", NO_DRAFTS

    def offer(self, count: int) -> None:
        """The next window checks the first ``count``."""
        self.tokens, self.flying = self.tokens[:count], self.source

    def outcome(self, checked: int, accepted: int) -> Outcome:
        """Of the window in flight, which has reported."""
        return self, self.flying, self._asked, self._given, checked, accepted

    def fade(self, factor: float) -> None:
        self.mtp.fade(factor)
        self.lookup.fade(factor)


Outcome = tuple[Drafts, DraftSource, DraftLimits, int, int, int]
"""One window: what was asked of whom, how many drafts a source gave, how many of them were checked, how many accepted."""
