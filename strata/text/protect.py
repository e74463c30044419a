"""Keeps the text of a conversation text: only the chat template may emit special tokens (C1).

Before the template runs, a mark is put inside every special token's name that stands in a message, so that the rendered text
holds whole names only where the template wrote them. After these have been found, the marks are taken out again and the
pieces between are encoded as plain text. A message that ends with the beginning of a name, or begins with the end of one, is
marked there as well, so that two messages cannot make a name together.

The mark is a Unicode noncharacter; one that a message itself holds is written as an escape, so every text comes back as it was.
Marks stand behind every character of a name, because names may overlap; a name of one character is written as its number.
Why not strip the names: a user may quote them. Why not tokenise messages apart: tokens cross the seam between template and message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from strata.text.specials import trie_pattern

_MARK = "\ufdd0"
_LITERAL, _BREAK = _MARK + "0", _MARK + "1"
_ESCAPES = re.compile(f"{_MARK}(?:([01])|2([0-9a-f]+);)")


class Protector:
    """Marks texts against a set of special token names."""

    def __init__(self, names: Iterable[str]) -> None:
        words = sorted(set(names))
        self._names = re.compile(trie_pattern(words)) if words else None
        self._heads = frozenset(word[:n] for word in words for n in range(1, len(word)))
        self._tails = frozenset(word[n:] for word in words for n in range(1, len(word)))
        self._longest = max(map(len, words), default=0)

    def mark(self, value: Any) -> Any:
        """``value`` (text, or lists and dicts of it, keys included) with marks. Raises ``RecursionError`` for very deep nesting."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value

    def _mark_text(self, text: str) -> str:
        if _MARK in text:
            text = text.replace(_MARK, _LITERAL)
        if self._names is None:
            return text
        marked = self._names.sub(_broken, text)
        if any(text[:n] in self._tails for n in range(1, min(len(text), self._longest) + 1)):
            marked = _BREAK + marked
        if any(text[-n:] in self._heads for n in range(1, min(len(text), self._longest) + 1)):
            marked += _BREAK
        return marked


def unmark(text: str) -> str:
    """The text without marks, as its author wrote it."""
    return _ESCAPES.sub(_original, text) if _MARK in text else text


def _broken(match: re.Match[str]) -> str:
    name = match.group()
    return f"{_MARK}2{ord(name):x};" if len(name) == 1 else "".join(char + _BREAK for char in name)


def _original(match: re.Match[str]) -> str:
    kind, number = match.groups()
    if number:
        return chr(int(number, 16))
    return _MARK if kind == "0" else ""
