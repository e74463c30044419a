"""Drafts from the slot's own text: what followed an earlier occurrence of its last tokens (prompt lookup, Saxena 2023).

Rules. The longest earlier match wins, of equal ones the latest; a match shorter than ``LEAST`` tokens is worth less than what a
head drafts, one shorter than ``LEAST_ALONE`` is worth less than nothing. A match that reaches the end of the text goes on into
its own continuation, so a repeated line is drafted on and on.

Why no index: comparing 262,144 tokens with one takes 0.02 to 0.8 ms, and an index of their triples 100 ms to build and 19 MB to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.engine.draft import Ask
from strata.messages import DraftSource, SegmentResult, Tokens, Window

LEAST = 3
LEAST_ALONE = 2
MOST = 16  # longer matches count as of this length: what is copied is hardly surer


class Lookup:
    """Keeps the text of the request in each slot, as far as drafts from it were asked for."""

    name: DraftSource = "lookup"

    def __init__(self) -> None:
        self._texts: dict[int, tuple[str, Text]] = {}

    def observe(self, window: Window, results: Sequence[SegmentResult]) -> None:
        """Nothing: the text comes with the segments that ask."""

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
        return continuation(tokens, LEAST if segment.draft_limits.mtp else LEAST_ALONE, ask.limit)


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


def continuation(tokens: NDArray[np.int32], least: int, count: int) -> Tokens:
    """Up to ``count`` tokens that followed the longest earlier match of at least ``least`` last ``tokens``; () without a match."""
    end = len(tokens)
    matches = np.flatnonzero(tokens[:-1] == tokens[-1])
    length = 1 if len(matches) else 0
    while 0 < length < MOST:
        longer = matches[matches >= length]
        longer = longer[tokens[longer - length] == tokens[end - 1 - length]]
        if not len(longer):
            break
        matches, length = longer, length + 1
    if length < least:
        return ()
    following = tokens[int(matches[-1]) + 1:]
    return tuple(np.resize(following, count).tolist())
