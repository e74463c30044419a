"""One choice of an answer: tokens in, text and logprobs out, whether it is streamed or not.

Only what the client may see counts: when a stop string matches, tokens that the engine had already picked after it are dropped,
so the same request counts the same tokens however fast the engine is, and drafts among them are none that were accepted for it.
A stop token's text is not shown; its count is.
"""

from __future__ import annotations

from dataclasses import replace

from strata.messages import Failed, Finished, NewTokens, TokenLogprob, Usage
from strata.request import Request
from strata.server.parameters import Output
from strata.text.detokenize import Detokenizer


class Choice:
    """``text``, ``logprobs`` and ``ids`` are what has come since ``take_text`` and its like last took it."""

    __slots__ = (
        "index", "request", "generated", "stop_string", "stop_token", "reason", "usage", "slot", "error", "last_time",
        "cached", "_dropped", "_detokenizer", "_output", "_parts", "_logprobs", "_prompt_logprobs", "_ids",
    )

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer, output: Output) -> None:
        self.index = index
        self.request = request
        self.generated = 0
        self.stop_string: str | None = None
        self.stop_token: int | None = None
        self.reason = ""
        self.usage: Usage | None = None
        self.slot = -1
        self.error: Exception | None = None
        self.last_time: float | None = None
        self.cached = 0
        self._dropped = 0  # accepted drafts behind a stop string
        self._detokenizer = detokenizer
        self._output = output
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._ids: list[int] = []

    @property
    def is_over(self) -> bool:
        return self.usage is not None

    def take(self, event: NewTokens) -> int:
        """Turn tokens into text; returns how many of them count."""
        before = self.generated
        self._prompt_logprobs.extend(event.prompt_logprobs)
        for n, token in enumerate(event.tokens):
            if self.stop_string is not None:
                break
            self.generated += 1
            if event.logprobs:
                self._logprobs.append(event.logprobs[n])
            if self._output.token_ids:
                self._ids.append(token)
            if token in self.request.stop_tokens:
                if token in self._output.stop_token_ids:
                    self.stop_token = token
                continue
            text = self._detokenizer.push(token)
            if text:
                self._parts.append(text)
            if self._detokenizer.stopped is not None:
                self._stop_at(self._detokenizer.stopped)
        count = self.generated - before
        self._dropped += max(0, event.accepted - count)
        return count

    def finish(self, event: Finished) -> None:
        self._flush()
        self.usage, self.slot = self._seen(event.usage), event.slot
        self.reason = "stop" if self.stop_string is not None else event.reason

    def fail(self, event: Failed) -> None:
        self.usage, self.error = self._seen(event.usage), event.error

    def _seen(self, usage: Usage) -> Usage:
        """The slot machine's counts, without what lay behind a stop string."""
        return replace(usage, generated=self.generated, accepted=usage.accepted - self._dropped)

    def _flush(self) -> None:
        if self.stop_string is None:
            rest = self._detokenizer.flush()
            if rest:
                self._parts.append(rest)
            if self._detokenizer.stopped is not None:
                self._stop_at(self._detokenizer.stopped)

    def _stop_at(self, stop: str) -> None:
        self.stop_string = stop
        if self._output.include_stop:
            self._parts.append(stop)

    # ---------------------------------------------------------------- taken by the writer

    @property
    def has_news(self) -> bool:
        return bool(self._parts or self._logprobs or self._ids)

    def take_text(self) -> str:
        text = "".join(self._parts)
        self._parts.clear()
        return text

    def take_logprobs(self) -> list[TokenLogprob]:
        entries, self._logprobs = self._logprobs, []
        return entries

    def take_prompt_logprobs(self) -> list[TokenLogprob]:
        entries, self._prompt_logprobs = self._prompt_logprobs, []
        return entries

    def take_ids(self) -> list[int]:
        ids, self._ids = self._ids, []
        return ids

    @property
    def stop_reason(self) -> str | int | None:
        """What stopped it, in vLLM's terms: the string, the id of a stop token that the client gave, else None."""
        return self.stop_string if self.stop_string is not None else self.stop_token
