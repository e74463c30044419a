"""The server as a process: signals, exit status, what it logs, and life without uvloop."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.process import Process, launched
from tests.e2e.serving import COMPLETIONS, TINY, assert_same, cold, completion, some_tokens

posix = pytest.mark.skipif(os.name == "nt", reason="a Windows process cannot be sent a signal that it handles")
LONG = 700


@posix
async def test_a_signal_lets_answers_end_and_takes_nothing_new() -> None:
    """A request whose body is still on its way keeps the drain open for as long as the test needs."""
    async with launched() as process:
        await process.until_ready()
        late, fresh = await Raw.connect(process), await Raw.connect(process)
        late.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n{")
        stream = await (await process.stream(some_tokens(5), 300)).until(1)
        process.signal(signal.SIGTERM)
        while (ready := await process.call("GET", "/ready")).status == 200:
            pass
        assert ready.status == 503
        new = await process.call("POST", COMPLETIONS, completion(some_tokens(6), 4))
        assert (new.status, (await new.json())["error"]["code"]) == (503, "draining")
        assert int(new.headers["retry-after"]) >= 1
        fresh.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await fresh.rest()).startswith(b"HTTP/1.1 200 "), "a connection that was there already gets its first answer"
        result = await stream.finish()
        assert (len(result.tokens), result.finish) == (300, "length")
        late.write(b'"prompt":"x"}')
        assert (await late.rest()).startswith(b"HTTP/1.1 503 ")
        assert await process.ended() == 0
    assert process.log[-1].endswith("stopped")


class Raw:
    """A connection on which the test writes what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.write, self._writer = reader, writer.write, writer

    @classmethod
    async def connect(cls, process: Process) -> Raw:
        return cls(*await asyncio.open_connection("127.0.0.1", int(process.url.rpartition(":")[2])))

    async def rest(self) -> bytes:
        """Everything up to the end that the server makes."""
        try:
            return await self._reader.read()
        finally:
            self._writer.close()


async def cut_off(process: Process, prompt: list[int]) -> str:
    """Read a stream to its error event; the error's code."""
    call = await process.call("POST", COMPLETIONS, completion(prompt, LONG, stream=True))
    tokens = 0
    while "error" not in (event := await call.event()):
        tokens += len(event["choices"][0]["token_ids"])
        if tokens == 1:
            process.signal(signal.SIGTERM)
            await process.until_line("stopping")
            process.signal(signal.SIGTERM)
    assert tokens < LONG and await call.event() is None
    return str(event["error"]["code"])


@posix
@pytest.mark.parametrize("seconds", ["0.05", "300"])
async def test_what_does_not_end_in_time_or_before_the_second_signal_is_told_so(seconds: str) -> None:
    """B12, while answering. With the short bound the second signal comes when the end is near anyway, and does no harm."""
    async with launched("--drain-timeout-s", seconds) as process:
        await process.until_ready()
        assert await cut_off(process, some_tokens(5)) == "draining"
        assert await process.ended() == 0


@posix
async def test_a_signal_while_a_long_prompt_is_read() -> None:
    """B12: the chunk under way is the last one."""
    async with launched("--drain-timeout-s", "0", "--context", "4096", "--chunk", "128", "--deterministic") as process:
        await process.until_ready()
        call = await process.open("POST", COMPLETIONS, completion(some_tokens(4000), 4))
        while not any(slot["state"] == "reading" for slot in await process.get("/slots")):
            pass
        process.signal(signal.SIGTERM)
        assert (await call.answered()).status == 503
        assert await process.ended() == 0


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_idle_connections_do_not_hold_it_up(number: int) -> None:
    async with launched("--drain-timeout-s", "300") as process:
        await process.until_ready()
        idle = await Raw.connect(process)
        await process.get("/health")
        process.signal(number)
        assert await process.ended() == 0
        assert await idle.rest() == b""


async def test_a_setting_that_does_not_exist() -> None:
    async with launched("--contxt", "5") as process:
        assert await process.ended() == 2
    assert len(process.log) == 1 and "--context" in process.log[0]


async def test_a_model_that_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(TINY.read_bytes()[:-100_000])
    async with launched(model=path) as process:
        assert await process.ended() == 1
    assert len(process.log) == 1 and "model.gguf" in process.log[0]


async def test_nothing_of_a_request_or_a_key_is_logged() -> None:
    async with launched(STRATA_API_KEY="a-secret-key") as process:
        await process.until_ready()
        headers = {"Authorization": "Bearer a-secret-key"}
        call = await process.call("POST", COMPLETIONS, completion("a secret prompt", 4), headers)
        assert call.status == 200 and await call.read()
        assert (await process.call("POST", COMPLETIONS, completion("a secret prompt", 4))).status == 401
        await process.until_line("status=401")
    assert any("status=200" in line and "generated=4" in line for line in process.log)
    assert "secret" not in "\n".join(process.log)


@posix
async def test_without_uvloop_as_on_windows() -> None:
    async with launched(before="import sys; sys.modules['uvloop'] = None") as process:
        await process.until_ready()
        result = await process.complete(some_tokens(30))
        process.signal(signal.SIGTERM)
        assert await process.ended() == 0
    assert_same(result, await cold(some_tokens(30)))
