"""An HTTP client for one request at a time, its answers parsed by h11's client side: not the server's own code.

``Call`` is one exchange on a connection of its own; ``Stream`` reads a streamed completion event by event; both leave it to the
test when to read on and when to go.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11


class Call:
    """One request on a connection of its own, its head answered. ``leave`` closes the connection like a client that has gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._h11 = h11.Connection(h11.CLIENT)
        self._events: deque[str] = deque()
        self._rest = b""
        self.status = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def open(cls, url: str, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Call:
        """Send a request and do not wait for the answer; ``answered`` does."""
        address = urlsplit(url)
        call = cls(*await asyncio.open_connection(address.hostname, address.port))
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {"Host": address.netloc, "Content-Length": str(len(data)), "Connection": "close", **(headers or {})}
        out = call._h11.send(h11.Request(method=method, target=path, headers=list(lines.items()))) or b""
        out += call._h11.send(h11.Data(data=data)) or b""
        call._writer.write(out + (call._h11.send(h11.EndOfMessage()) or b""))
        await call._writer.drain()
        return call

    async def answered(self) -> Call:
        """Wait for the status and the headers (in lower case)."""
        response = await self._next()
        assert isinstance(response, h11.Response), response
        self.status = response.status_code
        self.headers = {name.decode(): value.decode() for name, value in response.headers}
        return self

    async def read(self) -> bytes:
        """The whole body."""
        body = b""
        while isinstance(event := await self._next(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage), "the answer was cut off"
        self.leave()
        return body

    async def json(self) -> Any:
        return json.loads(await self.read())

    async def event(self) -> Any:
        """The next server-sent event, None after [DONE]."""
        while not self._events:
            data = await self._next()
            assert isinstance(data, h11.Data), "the stream was cut off"
            *whole, self._rest = (self._rest + bytes(data.data)).split(b"\n\n")
            self._events.extend(part[6:].decode() for part in whole if part.startswith(b"data: "))
        event = self._events.popleft()
        if event != "[DONE]":
            return json.loads(event)
        self.leave()
        return None

    def leave(self) -> None:
        self._writer.transport.abort()

    async def _next(self) -> Any:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(await self._reader.read(1 << 16))
        return event


@dataclass
class Result:
    """One choice of an answer, as far as it has come. ``gaps``: nats between the two likeliest tokens, where logprobs were asked for."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def bits(self) -> tuple[list[int], list[float]]:
        """What must be equal to the last bit: tokens, and the float of every logprob."""
        return self.tokens, self.logprobs

    def take(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        """Add a whole answer's choice, or a chunk's."""
        self.tokens += choice.get("token_ids") or []
        self.text += choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
        self.finish = choice.get("finish_reason") or self.finish
        self._take_logprobs(choice.get("logprobs") or {})
        self.take_tail(body)

    def _take_logprobs(self, lists: dict[str, Any]) -> None:
        """In the shape of completions or of chat."""
        self.logprobs += lists.get("token_logprobs") or [entry["logprob"] for entry in lists.get("content") or []]
        tops = [list(top.values()) for top in lists.get("top_logprobs") or [] if top is not None]
        tops += [[one["logprob"] for one in entry["top_logprobs"]] for entry in lists.get("content") or []]
        for top in tops:
            best = sorted(top, reverse=True)
            self.gaps.append(best[0] - best[1] if len(best) > 1 else float("inf"))

    def take_tail(self, body: dict[str, Any]) -> None:
        self.usage = body.get("usage") or self.usage
        self.timings = body.get("timings") or self.timings


class Stream:
    """A streamed completion that is read event by event."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.result = Result()
        self.id = ""

    async def next(self) -> bool:
        """Take the next event; False at the end."""
        if not self._call.status:
            await self._call.answered()
            assert self._call.status == 200, await self._call.read()
        event = await self._call.event()
        if event is None:
            return False
        assert "error" not in event, event
        self.id = event["id"]
        for choice in event["choices"]:
            self.result.take(event, choice)
        self.result.take_tail(event)
        return True

    async def until(self, tokens: int) -> Stream:
        """Read until there are so many tokens."""
        while len(self.result.tokens) < tokens:
            assert await self.next(), "the answer ended before"
        return self

    async def finish(self) -> Result:
        while await self.next():
            pass
        return self.result

    def leave(self) -> None:
        self._call.leave()
