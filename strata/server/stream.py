"""A streamed answer: server-sent events, one write per turn of the loop.

The 200 goes out with the first token, or when the stream has been silent for a keep-alive interval: until then a refusal or a
failure still has its own status. Later an error is an event, followed by ``[DONE]``. A choice's order is: role (chat), text,
one chunk with its finish reason; then, if asked for, a chunk with the usage; the last chunk carries seed and timings.
"""

from __future__ import annotations

import asyncio
import time

import orjson

from strata.errors import StrataError
from strata.messages import Progress
from strata.server.admission import Admitted
from strata.server.answer import Answer, finish_members
from strata.server.choice import Choice
from strata.server.exchange import Exchange, error_object
from strata.server.service import Service, Site
from strata.server.shapes import ROLE, Chunks, Style, envelope

HEADERS = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-cache"),
    ("X-Accel-Buffering", "no"),
)
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def failure_event(error: StrataError) -> bytes:
    return b"data: " + orjson.dumps({"error": error_object(error)}) + b"\n\n" + DONE


class StreamedAnswer(Answer):
    """See the head of this file."""

    def __init__(self, site: Site, service: Service, exchange: Exchange, admitted: Admitted, style: Style) -> None:
        super().__init__(site, service, exchange, admitted, style)
        shared = envelope(admitted.id, style.chunk, int(time.time()), service.model.name, site.fingerprint)
        self._chunks = Chunks(style, shared, {"usage": None} if self.output.include_usage else {})
        self._out: list[bytes] = []
        self._opened: set[int] = set()
        # A plain chunk is text alone; anything that needs more goes the slower way.
        self._is_plain = self.output.logprobs < 0 and not self.output.token_ids and not self.output.continuous_usage
        self._interval = site.settings.sse_keep_alive_s
        self._last_write = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        self._watch_silence()
        try:
            await super().run()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    # ---------------------------------------------------------------- chunks

    def written(self) -> None:
        for choice in self.choices:
            if choice.has_news:
                self._write_text(choice)
        if self._out:
            self._send(b"".join(self._out))
            self._out.clear()

    def progressed(self, choice: Choice, event: Progress) -> None:
        if not self.output.progress:
            return
        self._open_choice(choice)
        elapsed = (self.site.clock() - self._began) * 1e3
        progress = {"total": event.total, "cache": event.cached, "processed": event.read, "time_ms": round(elapsed)}
        self._out.append(
            self._chunks.choice(self.style.chunk_choice(choice.index, None, {}), {"prompt_progress": progress})
        )

    def finished(self, choice: Choice) -> None:
        self._open_choice(choice)
        if choice.has_news:
            self._write_text(choice)
        last = self.style.chunk_choice(choice.index, None, finish_members(choice))
        is_last = all(each.is_over for each in self.choices) and not self.output.include_usage
        tail = self._closing() if is_last else None
        self._out.append(self._chunks.choice(last, tail))

    def complete(self) -> None:
        if self.output.include_usage:
            self._out.append(self._chunks.choice(None, {"usage": self.usage(), **self._closing()}))
        self._out.append(DONE)
        self._send(b"".join(self._out))
        self.exchange.end()

    def _closing(self) -> dict[str, object]:
        return {"seed": self.admitted.seed, "timings": self.timings()}

    def _open_choice(self, choice: Choice) -> None:
        """What comes before a choice's first text: its role, or the echoed prompt."""
        if choice.index in self._opened:
            return
        self._opened.add(choice.index)
        if self.style.chat:
            self._out.append(self._chunks.choice(self.style.chunk_choice(choice.index, None, ROLE)))
        elif self.output.echo:
            more = {"logprobs": self.logprobs_of(choice, with_prompt=True)} if self.output.logprobs >= 0 else {}
            text = self.admitted.prompts[self.prompt_of(choice)].text
            self._out.append(self._chunks.choice(self.style.chunk_choice(choice.index, text, more)))

    def _write_text(self, choice: Choice) -> None:
        self._open_choice(choice)
        text = choice.take_text()
        if self._is_plain:
            if text:
                self._out.append(self._chunks.text(choice.index, text))
            return
        more: dict[str, object] = {}
        if self.output.logprobs >= 0:
            more["logprobs"] = self.logprobs_of(choice, with_prompt=False)
        if self.output.token_ids:
            more["token_ids"] = choice.take_ids()
        tail: dict[str, object] | None = {"usage": self.usage()} if self.output.continuous_usage else None
        self._out.append(self._chunks.choice(self.style.chunk_choice(choice.index, text, more), tail))

    # ---------------------------------------------------------------- the wire

    def _send(self, data: bytes) -> None:
        self.exchange.start(HEADERS, failure_event)
        self.exchange.write(data)
        self._last_write = self._loop.time()

    def _watch_silence(self) -> None:
        """A comment whenever nothing was written for an interval, so that no proxy takes the stream for dead."""
        if not self._interval:
            return
        silent = self._loop.time() - self._last_write
        if silent >= self._interval:
            self._send(KEEP_ALIVE)
            silent = 0.0
        self._timer = self._loop.call_later(self._interval - silent, self._watch_silence)
