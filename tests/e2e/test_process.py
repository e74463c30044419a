"""The server as a process: signals, exit status, what it logs, and life without uvloop."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.e2e.process import Process, launched
from tests.e2e.serving import COMPLETIONS, TINY, assert_same, cold, completion, some_tokens

posix = pytest.mark.skipif(os.name == "nt", reason="a Windows process cannot be sent a signal that it handles")
LONG = 700


@posix
async def test_a_signal_lets_answers_end_and_takes_nothing_new() -> None:
    async with launched() as process:
        await process.until_ready()
        stream = await (await process.stream(some_tokens(5), LONG)).until(1)
        process.signal(signal.SIGTERM)
        while (ready := await process.call("GET", "/ready")).status == 200:
            pass
        assert ready.status == 503
        new = await process.call("POST", COMPLETIONS, completion(some_tokens(6), 4))
        assert (new.status, (await new.json())["error"]["code"]) == (503, "draining")
        assert int(new.headers["retry-after"]) >= 1
        assert await process.get("/health") == {"status": "ok"}
        result = await stream.finish()
        assert (len(result.tokens), result.finish) == (LONG, "length")
        assert await process.ended() == 0
    assert process.log[-1].endswith("stopped")


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
        with socket.create_connection(("127.0.0.1", int(process.url.rpartition(":")[2]))) as idle:
            await process.get("/health")
            process.signal(number)
            assert await process.ended() == 0
            assert idle.recv(1) == b""


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
