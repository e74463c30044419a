"""Logprobs in OpenAI's two shapes: chat's list of objects, and the four parallel lists of completions.

A token that is not a whole character is written ``bytes:\\xf0\\x9f``, as OpenAI does, so that different tokens stay different.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from strata.messages import TokenLogprob
from strata.server.prompts import Prompt
from strata.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no -inf; OpenAI writes this


def token_name(tokenizer: Tokenizer, token: int) -> str:
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, object]:
    def one(token: int, logprob: float) -> dict[str, object]:
        data = tokenizer.token_bytes(token)
        return {"token": token_name(tokenizer, token), "logprob": finite(logprob), "bytes": list(data)}

    content = [
        {**one(entry.token, entry.logprob), "top_logprobs": [one(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The lists of one choice, taken in pieces: ``text_offset`` goes on from one piece to the next, over the text that is shown."""

    def __init__(self, tokenizer: Tokenizer, keep_special: bool) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, prompt: Prompt, entries: Sequence[TokenLogprob]) -> dict[str, list[object]]:
        """Of the echoed prompt: its first token has no logprob, the others one each."""
        lists = self._lists()
        first, *others = prompt.tokens
        self._add(lists, first, None, prompt.text.startswith(self._tokenizer.decode([first])))
        for token, entry in zip(others, entries):
            self._add(lists, token, entry, True)
        return lists

    def answer(self, entries: Sequence[TokenLogprob]) -> dict[str, list[object]]:
        lists = self._lists()
        for entry in entries:
            self._add(lists, entry.token, entry, self._keep_special or not self._tokenizer.is_special(entry.token))
        return lists

    @staticmethod
    def _lists() -> dict[str, list[object]]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _add(self, lists: dict[str, list[object]], token: int, entry: TokenLogprob | None, is_shown: bool) -> None:
        name = token_name(self._tokenizer, token)
        lists["tokens"].append(name)
        lists["text_offset"].append(self._offset)
        if is_shown:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        if entry is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        top = {token_name(self._tokenizer, other): finite(logprob) for other, logprob in entry.top}
        lists["token_logprobs"].append(finite(entry.logprob))
        lists["top_logprobs"].append({**top, name: finite(entry.logprob)})


def joined(first: dict[str, list[object]], second: dict[str, list[object]]) -> dict[str, list[object]]:
    return {name: first[name] + second[name] for name in first}
