"""From h11's request event to a ``Head``, and the refusals that h11 leaves to its user.

h11 is lenient in four places where a proxy in front may read the same bytes differently, which is how requests are smuggled:
it takes Content-Length together with Transfer-Encoding, bare LF as a line end, folded headers, and any size of head that
arrives at once. All four are refused here. Messages never quote the client's bytes.
"""

from __future__ import annotations

import re
import secrets
import time
from email.utils import formatdate
from functools import lru_cache
from urllib.parse import unquote_to_bytes

import h11

from strata.errors import ClientError, HeadersTooLarge, StrataError, TooLarge, Unavailable, UnsupportedMedia
from strata.server.exchange import Head, error_response
from strata.server.limits import Limits

_BAD_LINE_END = re.compile(rb"(?<!\r)\n|\n[ \t]")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_SLASHES = re.compile(r"/{2,}")
_PROTOCOL_ERRORS = {
    413: "the request is too large",
    431: "the request's headers are too large",
    501: "this transfer coding is not supported",
}


def protocol_error(status: int) -> StrataError:
    """The error for bytes that are not HTTP; ``status`` is h11's hint."""
    error: StrataError = HeadersTooLarge(_PROTOCOL_ERRORS[431]) if status == 431 else ClientError("malformed HTTP request")
    if status in _PROTOCOL_ERRORS and status != 431:
        error.message = _PROTOCOL_ERRORS[status]
        error.status = status
    return error


def check_raw_head(raw: bytes, event: h11.Request, limits: Limits) -> None:
    """Raise for a head whose bytes are over a cap or readable in two ways."""
    if len(raw) > limits.header_bytes:
        raise HeadersTooLarge(f"request line and headers may have {limits.header_bytes} bytes")
    if len(event.headers) > limits.header_count:
        raise HeadersTooLarge(f"a request may have {limits.header_count} headers")
    if _BAD_LINE_END.search(raw):
        raise ClientError("malformed HTTP request: lines must end in CRLF and headers must not be folded")
    names = {name for name, _ in event.headers}
    if b"content-length" in names and b"transfer-encoding" in names:
        raise ClientError("malformed HTTP request: Content-Length together with Transfer-Encoding")


def check_body_head(head: Head, limits: Limits) -> None:
    """Raise for a body that will not be read, before any of it is."""
    length = head.header("content-length")
    if length and int(length) > limits.body_bytes:
        raise body_too_large(limits)
    if head.header("content-encoding").strip().lower() not in ("", "identity"):
        raise UnsupportedMedia("compressed request bodies are not read here: send the body without Content-Encoding")


def body_too_large(limits: Limits) -> TooLarge:
    return TooLarge(f"a request body may have {limits.body_bytes} bytes")


def make_head(event: h11.Request, client: str) -> Head:
    headers: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    path, _, query = origin_form(event.target.decode("ascii")).partition("?")
    given = headers.get("x-request-id", "")
    request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
    return Head(event.method.decode("ascii"), clean_path(path), query, headers, client, request_id)


def nameless_head(client: str, method: str = "") -> Head:
    """Stands for a request that was not understood, or no further than to its ``method``."""
    return Head(method, "", "", {}, client, secrets.token_hex(8))


def too_many_connections() -> bytes:
    """The whole answer to a connection that there is no room for; its request is not waited for."""
    body = error_response(Unavailable("too many connections", code="too_many_connections")).body
    lines = ("HTTP/1.1 503 ", "Content-Type: application/json", "Retry-After: 1", "Connection: close", f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("ascii") + body


def http_date() -> str:
    """Now, as a Date header has it."""
    return _format_date(int(time.time()))


@lru_cache(maxsize=1)
def _format_date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)


def origin_form(target: str) -> str:
    """``http://host/path`` (what clients send through a proxy) and ``/path`` name the same thing here."""
    scheme, separator, rest = target.partition("://")
    if separator and scheme.lower() in ("http", "https") and "/" not in scheme:
        slash, question = rest.find("/"), rest.find("?")
        if slash < 0 or 0 <= question < slash:
            return "/" + rest[question:] if question >= 0 else "/"
        return rest[slash:]
    return target


def clean_path(path: str) -> str:
    """Percent-decoded, slashes merged, one trailing slash dropped. Bytes that are not UTF-8 become U+FFFD and match nothing."""
    path = _SLASHES.sub("/", unquote_to_bytes(path).decode("utf-8", "replace"))
    return path[:-1] if len(path) > 1 and path.endswith("/") else path
