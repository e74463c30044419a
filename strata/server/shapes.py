"""The JSON of answers: usage, timings, the objects around choices, and the two kinds' choices.

A streamed chunk is glued from bytes made once per request, because at ten thousand chunks a second the encoder would be the
server's largest cost. ``Style`` holds what differs between completions and chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from strata.messages import Usage


@dataclass(frozen=True, slots=True)
class Style:
    """``whole`` and ``chunk``: the values of ``object``. ``chat``: text lives in a message or delta."""

    whole: str
    chunk: str
    chat: bool

    def chunk_choice(self, index: int, text: str | None, more: dict[str, object]) -> dict[str, object]:
        """A choice in a chunk; ``text`` None: nothing new. ``more``: what differs from a plain chunk."""
        said: dict[str, object] = {"text": text or ""}
        if self.chat:
            said = {"delta": {} if text is None else {"content": text}}
        return {"index": index, **said, "logprobs": None, "finish_reason": None, **more}

    def whole_choice(self, index: int, text: str, more: dict[str, object]) -> dict[str, object]:
        said: dict[str, object] = {"text": text}
        if self.chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **said, **more}

    def plain_ends(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind the text in a chunk with nothing else in it."""
        if self.chat:
            return b'{"index":%d,"delta":{"content":' % index, b'},"logprobs":null,"finish_reason":null}'
        return b'{"index":%d,"text":' % index, b',"logprobs":null,"finish_reason":null}'


COMPLETION = Style("text_completion", "text_completion", chat=False)
CHAT = Style("chat.completion", "chat.completion.chunk", chat=True)

ROLE: dict[str, object] = {"delta": {"role": "assistant", "content": ""}}


def envelope(answer_id: str, kind: str, created: int, model: str, fingerprint: str) -> dict[str, object]:
    """The members that every object of one answer shares."""
    return {"id": answer_id, "object": kind, "created": created, "model": model, "system_fingerprint": fingerprint}


class Chunks:
    """Writes the server-sent events of one answer. ``tail``: further members of every plain chunk (``"usage":null``)."""

    def __init__(self, style: Style, shared: dict[str, object], tail: dict[str, object]) -> None:
        self._style = style
        self._head = b"data: " + orjson.dumps(shared)[:-1] + b',"choices":['
        self._end = b"]" + self._members(tail) + b"}\n\n"
        self._plain: dict[int, tuple[bytes, bytes]] = {}

    def text(self, index: int, text: str) -> bytes:
        """A chunk with text and nothing else."""
        ends = self._plain.get(index)
        if ends is None:
            before, behind = self._style.plain_ends(index)
            ends = self._plain[index] = (self._head + before, behind + self._end)
        return ends[0] + orjson.dumps(text) + ends[1]

    def choice(self, choice: dict[str, object] | None, tail: dict[str, object] | None = None) -> bytes:
        """Any other chunk; without a choice ``choices`` is empty. ``tail`` replaces the usual further members."""
        end = self._end if tail is None else b"]" + self._members(tail) + b"}\n\n"
        return self._head + (orjson.dumps(choice) if choice is not None else b"") + end

    @staticmethod
    def _members(values: dict[str, object]) -> bytes:
        return b"," + orjson.dumps(values)[1:-1] if values else b""


# ---------------------------------------------------------------- counts and times


def usage_object(prompt: int, cached: int, generated: int, drafted: int = 0, accepted: int = 0) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def timings_object(usages: Sequence[Usage], generated: int) -> dict[str, object]:
    """llama.cpp's names. Of several choices: counts add up, times are the longest one's."""
    cached = sum(usage.cached for usage in usages)
    read = sum(usage.prompt for usage in usages) - cached
    prompt_ms = round(max(usage.prompt_s for usage in usages) * 1e3, 3)
    predicted_ms = round(max(usage.decode_s for usage in usages) * 1e3, 3)
    # The first token belongs to the prompt's time: the rate is that of the tokens after it.
    later = generated - len(usages)
    return {
        "cache_n": cached,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_second": _rate(read, prompt_ms),
        "predicted_n": generated,
        "predicted_ms": predicted_ms,
        "predicted_per_second": _rate(later, predicted_ms),
        "draft_n": sum(usage.drafted for usage in usages),
        "draft_n_accepted": sum(usage.accepted for usage in usages),
    }


def _rate(count: int, milliseconds: float) -> float:
    return round(count / milliseconds * 1e3, 3) if milliseconds > 0 and count > 0 else 0.0
