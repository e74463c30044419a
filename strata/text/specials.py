"""Finds the special tokens of a text: leftmost, and of those that begin at one place the longest.

One regular expression, built as a trie: an alternation of some thousand names would be tried name by name at every ``<``,
which a text made of ``<`` turns into a denial of service.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import groupby

from strata.errors import ModelError

Piece = tuple[int, int, "int | None"]
_MAX_NESTING = 128  # names of which each begins the next; real ones (runs of spaces) come to about 30


class SpecialTokens:
    """A set of token texts to find. ``ids`` maps each text (never empty) to its id."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        try:
            self.pattern = re.compile(trie_pattern(sorted(self.ids))) if self.ids else None
        except (RecursionError, OverflowError, re.error):
            raise ModelError("tokenizer.ggml.tokens: too many special tokens begin with one another.") from None

    def split(self, text: str) -> Iterator[Piece]:
        """The text as ``(start, end, id)``, in order and without gaps; ``id`` is None for what is not a special token."""
        done = 0
        for match in self.pattern.finditer(text) if self.pattern else ():
            if match.start() > done:
                yield done, match.start(), None
            done = match.end()
            yield match.start(), done, self.ids[match.group()]
        if done < len(text):
            yield done, len(text), None


def trie_pattern(words: list[str], nesting: int = 0) -> str:
    """A pattern that matches the longest of ``words`` (sorted, no two alike) at a place, in time that does not grow with their
    number. Raises ``RecursionError`` where they nest too deeply."""
    if nesting > _MAX_NESTING:
        raise RecursionError
    branches = []
    optional = bool(words) and words[0] == ""
    for _, group in groupby(words[optional:], key=lambda word: word[0]):
        same = list(group)
        stem = os.path.commonprefix(same)
        rest = trie_pattern([word[len(stem) :] for word in same], nesting + 1) if len(same) > 1 else ""
        branches.append(re.escape(stem) + rest)
    return f"(?:{'|'.join(branches)})" + ("?" if optional else "")
