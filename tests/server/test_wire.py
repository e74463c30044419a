"""Properties of the wire: how bytes are cut says nothing, and no bytes can break a connection."""

from __future__ import annotations

import json
import re

from hypothesis import example, given, strategies as st

from tests.server.harness import World, settle

BODY = json.dumps({"prompt": "xyz", "max_tokens": 4, "seed": 1, "temperature": 0}).encode()
HEADS = (
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"HEAD /version HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET //nosuch HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: a\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n6\r\n{\"cont\r\n9\r\nent\":\"a\"}\r\n0\r\n\r\n",
    b"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n[1]",
)
# What differs from run to run.
VARIABLE = re.compile(
    rb"(?i)date: [^\r]*|x-request-id: [^\r]*|content-length: [^\r]*|\"(id|created|timings)\":(\"[^\"]*\"|\{[^}]*\}|[0-9]+)"
)


async def answers(pieces: list[bytes]) -> bytes:
    client = World().connect()
    for piece in pieces:
        if client.transport.is_closing():
            break
        client.send(piece)
        await settle(5)
    await settle(100)
    return VARIABLE.sub(b"", bytes(client.transport.sent))


@given(st.lists(st.sampled_from(HEADS), min_size=1, max_size=4), st.lists(st.integers(1, 60), max_size=30))
async def test_how_requests_are_cut_says_nothing(requests: list[bytes], cuts: list[int]) -> None:
    data = b"".join(requests)
    pieces, start = [], 0
    for size in cuts:
        pieces.append(data[start:start + size])
        start += size
    assert await answers([*filter(None, pieces), data[start:]] if start < len(data) else [*filter(None, pieces)]) == await answers([data])


NOISE = st.binary(max_size=40) | st.sampled_from([
    b"\r\n", b"\n", b" ", b"GET / HTTP/1.1", b"POST /tokenize HTTP/1.1", b"Host: localhost", b"Content-Length: 5",
    b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Connection: Upgrade", b"Upgrade: h2c", b"0\r\n\r\n", b"CONNECT a:1 HTTP/1.1",
    b"OPTIONS * HTTP/1.1", b"PRI * HTTP/2.0", b"GET http:// HTTP/1.1", b"GET ? HTTP/1.1", *HEADS,
])


@given(st.lists(NOISE, max_size=12))
@example([b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"more"])
@example([b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", b"more"])
@example([b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_no_bytes_break_a_connection(pieces: list[bytes]) -> None:
    world = World()
    client = world.connect()
    for piece in pieces:
        if client.transport.is_closing():
            break
        client.send(piece)
        await settle(5)
    client.leave()
    await settle()
    assert client.transport.is_closed and world.owner.open == 0
    sent = bytes(client.transport.sent)
    assert not sent or sent.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in sent.split(b"\r\n")[0]
    assert (await world.get("/health")).status == 200
