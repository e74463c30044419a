"""Drafts from the slot's own text: what followed an earlier occurrence of its last tokens (prompt lookup, Saxena 2023).

Rules. The longest earlier match wins, of equal ones the latest; a match shorter than ``LEAST`` tokens is worth less than what a
head drafts, one shorter than ``LEAST_ALONE`` is worth less than nothing. A match that reaches the end of the text goes on into
its own continuation, so a repeated line is drafted on and on.

How many. A match of three tokens is often chance, one of ten is a copy. So drafts are counted by the length of their match
(draft_trust.py): the n-th one, reached only if those before it were right, continues a match that is n - 1 tokens longer by then.

Why no index: comparing 262,144 tokens with one takes 0.02 to 0.8 ms, and an index of their triples 100 ms to build and 19 MB to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.engine.draft import Ask
from strata.engine.draft_trust import SORTS, Trust
from strata.messages import DraftSource, SegmentResult, Tokens, Window

LEAST = 3
LEAST_ALONE = 2
MOST = SORTS  # longer matches count as of this length: what is copied is hardly surer


class Lookup:
    """Keeps the text of the request in each slot, as far as drafts from it were asked for."""

    name: DraftSource = "lookup"

    def __init__(self) -> None:
        self.trust = Trust()
        self._texts: dict[int, tuple[str, Text]] = {}

    def observe(self, window: Window, results: Sequence[SegmentResult]) -> None:
        """What came of drafts; the text comes with the segments that ask."""
        for segment, result in zip(window.segments, results, strict=True):
            self.trust.checked(segment, result)

    def propose(self, asks: Sequence[Ask]) -> list[Tokens]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Tokens:
        segment = ask.segment
        if segment.history is None:
            return ()
        prompt, generated = segment.history
        name, text = self._texts.get(segment.slot, ("", None))
        if text is None or name != segment.request_id or text.prompt is not prompt:  # choices of one request share their prompt
            text = Text(prompt)
            self._texts[segment.slot] = segment.request_id, text
        tokens = text.grown(generated, ask.picks)
        length, start = longest_match(tokens)
        if length < (LEAST if segment.draft_limits.mtp else LEAST_ALONE):
            return ()
        sorts = [min(length + number, MOST) - 1 + SORTS * ask.is_drawn for number in range(ask.limit)]
        count = self.trust.worth(sorts)
        drafts = following(tokens, start, count)
        self.trust.proposed(segment, drafts, sorts[:count])
        return drafts


class Text:
    """A prompt and its answer as one growing array."""

    def __init__(self, prompt: Tokens) -> None:
        self.prompt = prompt
        self._tokens = np.array(prompt, np.int32)
        self._count = len(prompt)

    def grown(self, generated: Sequence[int], picks: Tokens) -> NDArray[np.int32]:
        """The whole text: prompt, ``generated`` and the ``picks`` that will follow it. What was seen before is not read again."""
        start = min(self._count, len(self.prompt) + len(generated))
        new = [*generated[start - len(self.prompt):], *picks]
        self._count = start + len(new)
        if self._count > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[:start], np.empty(self._count, np.int32)])
        self._tokens[start:self._count] = new
        return self._tokens[:self._count]


def longest_match(tokens: NDArray[np.int32]) -> tuple[int, int]:
    """How many last ``tokens`` (``MOST`` at most) occur earlier, and the place behind the latest of the longest such matches."""
    end = len(tokens)
    matches = np.flatnonzero(tokens[:-1] == tokens[-1])
    if not len(matches):
        return 0, end
    length = 1
    while length < MOST:
        longer = matches[matches >= length]
        longer = longer[tokens[longer - length] == tokens[end - 1 - length]]
        if not len(longer):
            break
        matches, length = longer, length + 1
    return length, int(matches[-1]) + 1


def following(tokens: NDArray[np.int32], start: int, count: int) -> Tokens:
    """``count`` tokens from ``start`` on; behind the last of ``tokens`` come those from ``start`` on again."""
    return tuple(np.resize(tokens[start:start + count], count).tolist())


def continuation(tokens: NDArray[np.int32], least: int, count: int) -> Tokens:
    """The ``count`` tokens that followed the longest earlier match of at least ``least`` last ``tokens``; () without a match."""
    length, start = longest_match(tokens)
    return following(tokens, start, count) if length >= least else ()
