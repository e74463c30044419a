"""Bytes on a connection: what is refused before it is understood, what is read, and when time is over."""

from __future__ import annotations

import dataclasses

import pytest

from strata.server.limits import Limits, Timeouts
from tests.clock import JumpClock
from tests.server.harness import Client, World, settle

GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def post(body: bytes, *lines: bytes) -> bytes:
    head = [b"POST /tokenize HTTP/1.1", b"Host: 127.0.0.1", *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


async def status_of(data: bytes, world: World | None = None) -> tuple[int, Client]:
    """The status of the first answer to ``data``."""
    client = (world or World()).connect()
    client.send(data)
    await settle()
    first = bytes(client.transport.sent).split(b"\r\n")[0]
    return (int(first.split()[1]) if first else 0), client


async def test_keep_alive_and_pipelining() -> None:
    client = World().connect()
    client.send(GET * 3)
    await settle()
    assert client.transport.sent.count(b"HTTP/1.1 200") == 3 and not client.transport.is_closed


async def test_one_byte_at_a_time() -> None:
    client = World().connect()
    for byte in post(b'{"content":"hi"}', b"Content-Length: 16"):
        client.send(bytes([byte]))
    await settle()
    assert client.transport.sent.startswith(b"HTTP/1.1 200")


async def test_connection_close_is_obeyed() -> None:
    status, client = await status_of(b"GET /health HTTP/1.1\r\nHost: a.localhost\r\nConnection: close\r\n\r\n")
    assert status == 200 and client.transport.is_closed


async def test_http_1_0_without_host() -> None:
    status, client = await status_of(b"GET /health HTTP/1.0\r\n\r\n")
    assert status == 200 and client.transport.is_closed


async def test_http_1_0_stream_ends_with_the_connection() -> None:
    body = b'{"prompt": "x", "stream": true, "max_tokens": 3}'
    status, client = await status_of(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert status == 200 and client.transport.is_closed
    assert b"chunked" not in client.transport.sent.lower() and client.transport.sent.endswith(b"\n\ndata: [DONE]\n\n")


async def test_chunked_body_in_three_chunks() -> None:
    body = b'5\r\n{"con\r\n7\r\ntent":"\r\n4\r\nhi"}\r\n0\r\n\r\n'
    status, client = await status_of(post(body, b"Transfer-Encoding: chunked"))
    assert status == 200 and not client.transport.is_closed


@pytest.mark.parametrize("data", [
    post(b"2\r\n{}\r\n0\r\n\r\n", b"Content-Length: 2", b"Transfer-Encoding: chunked"),
    post(b"{}", b"Content-Length: 2", b"Content-Length: 3"),
    post(b"{}", b"Content-Length: +2"),
    post(b"2\r\n{}XX0\r\n\r\n", b"Transfer-Encoding: chunked"),
    b"GET /health HTTP/1.1\nHost: 127.0.0.1\n\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: 1\r\n folded\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: 1\nX-B: 2\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "GET /hé HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode(),
], ids=["CL and TE", "two lengths", "signed length", "bad chunk end", "bare LF", "folded", "one bare LF", "no host", "space before colon",
        "TLS hello", "non-ASCII target"])
async def test_ambiguous_or_broken_requests_are_refused_and_closed(data: bytes) -> None:
    status, client = await status_of(data)
    assert status == 400
    assert client.transport.is_closed or client.transport.has_written_eof
    assert b"X-A" not in client.transport.sent and b"\x16" not in client.transport.sent, "the client's bytes are not sent back"


async def test_a_header_without_end() -> None:
    client = World().connect()
    client.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: ")
    for _ in range(20):
        client.send(b"a" * 4096)
    assert client.transport.sent.startswith(b"HTTP/1.1 431")
    for _ in range(1000):
        client.send(b"a" * 100_000)
    assert client.connection._reader.waiting == 0, "what comes after the refusal is not kept"


@pytest.mark.parametrize("lines", [[b"X-Long: " + b"a" * 70_000], [b"X-%d: 1" % n for n in range(200)]], ids=["bytes", "count"])
async def test_a_whole_head_that_is_too_large(lines: list[bytes]) -> None:
    status, _ = await status_of(post(b"", *lines))
    assert status == 431


@pytest.mark.parametrize("data, status", [
    (b"HEAD /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(200)) + b"\r\n", 431),
    (b"HEAD /health HTTP/1.1\nHost: 127.0.0.1\n\n", 400),
], ids=["count", "bare LF"])
async def test_a_refused_head_request_gets_a_head_alone(data: bytes, status: int) -> None:
    answer, client = await status_of(data)
    assert answer == status and client.transport.sent.endswith(b"\r\n\r\n") and client.transport.has_written_eof


async def test_content_length_over_the_cap_is_refused_before_the_body() -> None:
    status, client = await status_of(post(b"", b"Content-Length: 40000000"))
    assert status == 413 and client.transport.has_written_eof
    client.send(b"x" * 100_000)
    assert client.connection._reader.waiting == 0


async def test_chunked_body_over_the_cap() -> None:
    world = World(limits=Limits(body_bytes=1000))
    chunk = b"100\r\n" + b"x" * 256 + b"\r\n"
    assert (await status_of(post(chunk * 3 + b"0\r\n\r\n", b"Transfer-Encoding: chunked"), world))[0] == 400  # not JSON
    assert (await status_of(post(chunk * 4, b"Transfer-Encoding: chunked"), world))[0] == 413


async def test_compressed_bodies_are_not_read() -> None:
    assert (await status_of(post(b"xx", b"Content-Length: 2", b"Content-Encoding: gzip")))[0] == 415


async def test_expect_100_continue() -> None:
    body = b'{"content":"' + b"x" * 50_000 + b'"}'
    length = b"Content-Length: %d" % len(body)
    client = World().connect()
    client.send(post(b"", length, b"Expect: 100-continue"))
    assert client.transport.sent == b"HTTP/1.1 100 \r\n\r\n"
    client.send(body)
    await settle()
    assert b"HTTP/1.1 200" in client.transport.sent


async def test_expect_100_continue_is_refused_before_the_body() -> None:
    status, client = await status_of(post(b"", b"Content-Length: 40000000", b"Expect: 100-continue"))
    assert status == 413 and b" 100 " not in client.transport.sent


async def test_absolute_form_target() -> None:
    assert (await status_of(b"GET http://127.0.0.1:8080/health?x=1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))[0] == 200
    assert (await status_of(b"GET http://127.0.0.1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))[0] == 200


async def test_head_has_length_and_no_body() -> None:
    client = World().connect()
    answer = await client.request("HEAD", "/health")
    assert answer.status == 200 and int(answer.headers["content-length"]) > 0 and answer.body == b""
    assert (await client.request("GET", "/health")).status == 200


async def test_a_refused_request_does_not_end_the_connection() -> None:
    client = World().connect()
    client.send(b"GET /nosuch HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 500 + GET)
    await settle()
    assert client.transport.sent.count(b"HTTP/1.1 404") == 500 and client.transport.sent.count(b"HTTP/1.1 200") == 1
    assert not client.transport.is_closed


# ---------------------------------------------------------------- time


async def test_a_silent_connection_is_closed_without_a_word(jump_clock: JumpClock) -> None:
    client = World().connect()
    await client.until_closed()
    assert jump_clock.now == pytest.approx(10) and not client.transport.sent


async def test_a_head_that_does_not_end_in_time(jump_clock: JumpClock) -> None:
    client = World().connect()
    client.send(b"GET /health HT")
    await client.until_sent(b"HTTP/1.1 408")
    assert jump_clock.now == pytest.approx(10)


async def test_a_head_in_drops_is_not_given_more_time(jump_clock: JumpClock) -> None:
    client = World().connect()
    for byte in GET[:9]:
        client.send(bytes([byte]))
        jump_clock.advance(1)
        await settle()
    assert not client.transport.sent
    jump_clock.advance(1.1)
    await settle()
    assert client.transport.sent.startswith(b"HTTP/1.1 408")


async def test_a_body_may_pause_but_not_for_long(jump_clock: JumpClock) -> None:
    client = World().connect()
    client.send(post(b" " * 8192 * 40, b"Content-Length: 400000"))
    jump_clock.advance(29)
    client.send(b"{")
    jump_clock.advance(29)
    await settle()
    assert not client.transport.sent
    await client.until_sent(b"HTTP/1.1 408")
    assert jump_clock.now == pytest.approx(29 + 30)


async def test_a_body_in_drops_has_a_total_of_time_that_grows_with_its_size(jump_clock: JumpClock) -> None:
    for drop, end in ((b" ", 30), (b" " * 4096, 59), (b" " * 8192, 400)):
        client, began = World().connect(), jump_clock.now
        client.send(post(b"{", b"Content-Length: 30000000"))
        while not client.transport.sent and jump_clock.now < began + 400:
            jump_clock.advance(1)
            client.send(drop)
            await settle()
        assert jump_clock.now - began == pytest.approx(end, abs=2), len(drop)


async def test_idle_connections_are_closed_later_than_a_proxys(jump_clock: JumpClock) -> None:
    client = World().connect()
    await client.request("GET", "/health")
    await client.until_closed()
    assert jump_clock.now == pytest.approx(75)


async def test_a_refused_body_is_thrown_away_for_a_while(jump_clock: JumpClock) -> None:
    client = World().connect()
    client.send(post(b"", b"Content-Length: 40000000"))
    assert not client.transport.is_closed
    await client.until_closed()
    assert jump_clock.now == pytest.approx(5)


# ---------------------------------------------------------------- slow readers


async def test_a_client_that_takes_no_answers_gets_no_more(jump_clock: JumpClock) -> None:
    world = World(limits=dataclasses.replace(Limits(), timeouts=Timeouts(write=30)))
    client = world.connect()
    client.transport.stalled = True
    metrics = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    client.send(metrics * 1000)
    await settle(200)
    assert client.transport.waiting < 200_000
    client.transport.read_some(100_000)
    jump_clock.advance(1)
    await settle(200)
    assert client.transport.waiting < 200_000
    await client.until_closed()
    assert world.owner.open == 0


async def test_what_is_sent_ahead_is_bounded() -> None:
    world = World()
    world.engine.is_manual = True
    client = world.connect()
    await client.start("POST", "/v1/completions", {"prompt": "x"})
    client.send(GET * 2000)
    assert not client.transport.is_reading
    await settle()
    world.engine.is_manual = False
    world.engine.step()
    await client.answer()
    await settle(6000)
    assert client.transport.is_reading and client.transport.sent.count(b"HTTP/1.1 200") == 2001
