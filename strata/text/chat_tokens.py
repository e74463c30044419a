"""From the rendered (and marked) text of a conversation to its tokens, and from places in the text to counts of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.text.protect import unmark
from strata.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """``tokens``: the prompt. ``turn_marks``: rising counts of tokens, each the end of a user or tool turn; the last turn is
    among them wherever the template lets it be told apart. ``text``: the prompt as text."""

    tokens: tuple[int, ...]
    turn_marks: tuple[int, ...]
    text: str


def encode_marked(tokenizer: Tokenizer, whole: str, cuts: Sequence[int]) -> EncodedChat:
    """Encodes a marked text: whole names are special tokens, all else is plain text. BOS comes first once, where the model has one.

    A cut (a place in ``whole``) becomes the number of tokens that lie wholly before it.
    """
    tokens: list[int] = []
    marks: set[int] = set()
    fresh = True
    for start, end, special in tokenizer.specials.split(whole):
        ids = [special] if special is not None else tokenizer.encode_plain(unmark(whole[start:end]), fresh)
        for cut in cuts:
            if start < cut <= end:
                within = len(ids) if cut == end else _count_within(tokenizer, ids, whole[start:cut], whole[start:end])
                marks.add(len(tokens) + within)
        tokens += ids
        fresh = special is not None
    if tokenizer.bos is not None and tokenizer.add_bos and tokens[:1] != [tokenizer.bos]:
        tokens.insert(0, tokenizer.bos)
        marks = {mark + 1 for mark in marks}
    return EncodedChat(tuple(tokens), tuple(sorted(marks - {0})), unmark(whole))


def _count_within(tokenizer: Tokenizer, ids: Sequence[int], part: str, whole: str) -> int:
    """How many of ``ids``, the tokens of ``whole``, lie within its beginning ``part`` (both marked)."""
    ends, total = [], 0
    for token in ids:
        total += len(tokenizer.token_bytes(token))
        ends.append(total)
    # The space that sentencepiece puts in front belongs to the part as well.
    limit = len(unmark(part).encode()) + max(total - len(unmark(whole).encode()), 0)
    return sum(end <= limit for end in ends)
