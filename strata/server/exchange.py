"""One request and its answer on a connection: what a handler sees of HTTP.

A ``Head`` is the request without its body. An ``Exchange`` adds the body and the ways to answer: ``respond`` with a whole body,
or ``start``, ``write`` any number of times, ``end``. ``fail`` answers with an error object, or, when a stream has already begun,
with the failure event that the stream announced at its start. After the client has left every one of them does nothing, so a
handler needs no test of its own; its task is cancelled as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import orjson

from strata.errors import StrataError
from strata.messages import Usage

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Head:
    """``path`` is percent-decoded, without the query, slashes merged; ``headers`` has lower-case names, repeats joined with ', '."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    client: str = ""
    id: str = ""

    def header(self, name: str) -> str:
        return self.headers.get(name, "")


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer. ``body`` may be empty (204)."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: Headers = ()


def json_response(value: object, status: int = 200, headers: Headers = ()) -> Response:
    return Response(status, orjson.dumps(value), headers=headers)


def error_object(error: StrataError) -> dict[str, object]:
    """OpenAI's error object, with the status where streams have no other place for it."""
    code = error.code if error.code is not None else error.status
    return {"message": error.message, "type": error.type, "param": error.param, "code": code, **error.extra}


def error_response(error: StrataError) -> Response:
    headers: Headers = ()
    if error.retry_after is not None:
        headers = (("Retry-After", str(error.retry_after)),)
    return json_response({"error": error_object(error)}, error.status, headers)


class Wire(Protocol):
    """The connection's side: how an answer reaches the client."""

    def send_head(self, status: int, headers: Headers, length: int | None) -> None: ...

    def send_body(self, data: bytes) -> None: ...

    def send_end(self) -> None: ...


@dataclass(slots=True)
class Entry:
    """What the log line says of a request's choices, added up; ``end`` is the reason of the last one.

    ``open`` counts the choices that have not ended: the line waits for them, so that a client that left is logged with what
    it had used. ``write`` is set once the HTTP side is over.
    """

    open: int = 0
    end: str = ""
    slot: int = -1
    usage: Usage | None = None
    write: Callable[[], None] | None = None

    def add(self, end: str, slot: int, usage: Usage) -> None:
        self.end, self.slot = end, slot
        self.usage = usage if self.usage is None else added(self.usage, usage)

    def closed_one(self) -> None:
        self.open -= 1
        if self.open == 0 and self.write is not None:
            self.write()


def added(one: Usage, other: Usage) -> Usage:
    """Counts of both; the longer of the times."""
    return Usage(
        prompt=one.prompt + other.prompt,
        cached=one.cached + other.cached,
        generated=one.generated + other.generated,
        drafted=one.drafted + other.drafted,
        accepted=one.accepted + other.accepted,
        queue_s=max(one.queue_s, other.queue_s),
        prompt_s=max(one.prompt_s, other.prompt_s),
        decode_s=max(one.decode_s, other.decode_s),
    )


class Exchange:
    """See the head of this file. ``route`` is the template the request matched, for logs and metrics; ``argument`` what
    stood in the place of its ``{id}``; ``began`` when it was routed, None for what is no request at all."""

    def __init__(self, wire: Wire, head: Head) -> None:
        self.head = head
        self.body = b""
        self.began: float | None = None
        self.route = "other"
        self.argument = ""
        self.headers: Headers = (("X-Request-ID", head.id),)
        self.handler: Callable[[Exchange], Awaitable[None]] | None = None
        self.entry = Entry()
        self.status = 0
        self.sent = 0
        self.is_started = False
        self.is_over = False
        self.error: StrataError | None = None
        self.interruption: StrataError | None = None
        self._wire = wire
        self._failure: Callable[[StrataError], bytes] | None = None

    def respond(self, response: Response) -> None:
        """Answer with a whole body; to HEAD with its headers alone."""
        if self.is_started or self.is_over:
            return
        length = None if response.status == 204 else len(response.body)
        self._begin(response.status, (("Content-Type", response.content_type), *response.headers), length)
        if response.body and self.head.method != "HEAD":
            self.sent += len(response.body)
            self._wire.send_body(response.body)
        self.end()

    def start(self, headers: Headers, failure: Callable[[StrataError], bytes]) -> None:
        """Begin a streamed 200; ``failure`` makes the last event of a stream that breaks."""
        if self.is_started or self.is_over:
            return
        self._failure = failure
        self._begin(200, headers, None)

    def write(self, data: bytes) -> None:
        if not self.is_over and data:
            self.sent += len(data)
            self._wire.send_body(data)

    def end(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._wire.send_end()

    def fail(self, error: StrataError) -> None:
        """Tell the client of ``error`` in the form that is still possible."""
        if not self.is_over:
            self.error = error
        if not self.is_started:
            self.respond(error_response(error))
        elif self._failure is not None:
            self.write(self._failure(error))
            self.end()

    def leave(self) -> None:
        """The client is gone: from here on nothing is written."""
        self.is_over = True

    def _begin(self, status: int, headers: Headers, length: int | None) -> None:
        self.is_started = True
        self.status = status
        self._wire.send_head(status, (*headers, *self.headers), length)
