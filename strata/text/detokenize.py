"""Tokens to text as they come: whole characters only, no special tokens, nothing of a stop string.

A token may hold a part of a character, so bytes wait until the character is whole; bytes that cannot become one turn into
U+FFFD, at once if that is certain and else at the end. The joined text is the same however the tokens arrive. The first
token keeps its leading space: what is generated continues the prompt's text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from strata.text.stops import StopFilter
from strata.text.tokenizer import Tokenizer


class Detokenizer:
    """The way out of one answer. ``stops``: stop strings; ``keep_special``: special tokens are shown as their names."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._filter = StopFilter(stops)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did. From then on nothing more comes out."""
        return self._filter.stopped

    def push(self, token_id: int) -> str:
        """The text that this token lets out: often one word, sometimes none, sometimes what earlier tokens held back."""
        if not self._keep_special and self._tokenizer.is_special(token_id):
            return ""
        return self._filter.push(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """The rest, at the end of the answer. Calling it again gives nothing."""
        text = self._filter.push(self._utf8.decode(b"", True))
        return text + self._filter.flush()
