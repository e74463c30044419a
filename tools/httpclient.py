"""A small HTTP client for the benchmarks and load tools: standard library only, one connection per request.

It measures what a client sees: the time to the first token, the gaps between chunks, the end. It speaks to any server with
OpenAI's routes, so that a peer can be measured by the very same code.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    """What came back. ``times``: seconds (monotonic) of every chunk that carried text or tokens; ``sent``: when the request left.
    ``tokens``: their ids, where the request asked for them (``return_token_ids``)."""

    status: int
    sent: float
    times: list[float] = field(default_factory=list)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    error: str = ""
    done: float = 0.0

    @property
    def generated(self) -> int:
        return int(self.usage.get("completion_tokens", len(self.times)))

    @property
    def ttft(self) -> float:
        """Seconds to the first chunk with content; to the end where there was none."""
        return (self.times[0] if self.times else self.done) - self.sent

    @property
    def decode_ms(self) -> float:
        """Milliseconds per token after the first."""
        return 1e3 * (self.times[-1] - self.times[0]) / max(1, self.generated - 1) if self.times else float("nan")


class Client:
    """Requests to one base URL, e.g. ``http://127.0.0.1:8080``; ``key`` is sent as a bearer token."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.key = key

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        status, body = await self._send("GET", path, b"")
        return status, b"".join([part async for part in body])

    async def post(self, path: str, payload: dict[str, Any]) -> tuple[int, Any]:
        """Status and parsed body of a POST that is not streamed."""
        status, body = await self._send("POST", path, json.dumps(payload).encode())
        return status, json.loads(b"".join([part async for part in body]) or b"null")

    async def stream(self, path: str, payload: dict[str, Any], watch: Callable[[Answer], None] = lambda answer: None) -> Answer:
        """A streamed completion or chat, read to its end. ``watch`` is called after every event; what it raises drops the connection."""
        payload = {**payload, "stream": True, "stream_options": {"include_usage": True}}
        answer = Answer(0, time.monotonic())
        answer.status, body = await self._send("POST", path, json.dumps(payload).encode())
        if answer.status != 200:
            answer.error = b"".join([part async for part in body]).decode("utf-8", "replace")
        else:
            async with aclosing(body):
                async for event in _events(body):
                    _take(answer, event)
                    watch(answer)
        answer.done = time.monotonic()
        return answer

    async def _send(self, method: str, path: str, body: bytes) -> tuple[int, AsyncGenerator[bytes, None]]:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 20)
        head = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.key:
            head.append(f"Authorization: Bearer {self.key}")
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        chunked = any(line.lower().startswith("transfer-encoding:") and "chunked" in line.lower() for line in lines)
        return int(lines[0].split()[1]), _body(reader, writer, chunked)


async def _body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chunked: bool) -> AsyncGenerator[bytes, None]:
    try:
        while chunked:
            size = int((await reader.readline()).split(b";")[0] or b"0", 16)
            data = await reader.readexactly(size + 2)
            if size == 0:
                return
            yield data[:-2]
        while data := await reader.read(1 << 16):
            yield data
    finally:
        writer.close()


async def _events(body: AsyncIterator[bytes]) -> AsyncIterator[str]:
    rest = b""
    async for part in body:
        *lines, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


def _take(answer: Answer, event: str) -> None:
    if event == "[DONE]":
        return
    chunk = json.loads(event)
    if chunk.get("error"):
        answer.error = str(chunk["error"].get("message", chunk["error"]))
    answer.usage = chunk.get("usage") or answer.usage
    answer.timings = chunk.get("timings") or answer.timings
    for choice in chunk.get("choices") or ():
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        ids = choice.get("token_ids") or []
        answer.tokens += ids
        answer.finish = choice.get("finish_reason") or answer.finish
        if text or ids:
            answer.text += text
            answer.times.append(time.monotonic())
