"""Real sockets on a free port: start, caps, draining, and the official OpenAI client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from strata.config.settings import Settings
from strata.errors import StartError
from strata.server.limits import Limits
from strata.server.listener import Listener
from tests.server.harness import CONTEXT, END, ScriptedEngine, World, says, settle, tokens

HOST = "127.0.0.1"


@contextlib.asynccontextmanager
async def serving(world: World) -> AsyncIterator[Listener]:
    """The world behind a real port, with worker threads as in production."""
    listener = Listener(world.routes, world.limits)
    with ThreadPoolExecutor(2) as executor:
        world.site.executor = executor
        await listener.start(HOST, 0)
        try:
            yield listener
        finally:
            await listener.close()
            world.manager.close()


async def exchange(port: int, data: bytes) -> bytes:
    """Send, then read until the server closes."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()


def post(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def test_serves_and_stops() -> None:
    async with serving(World()) as listener:
        host, port = listener.address
        assert host == HOST and b'"status":"ok"' in await exchange(port, get("/health"))
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(HOST, port)


async def test_a_busy_port_names_host_port_and_remedy() -> None:
    async with serving(World()) as listener:
        port = listener.address[1]
        with pytest.raises(StartError, match=f"127.0.0.1:{port}.*--port"):
            await Listener(World().routes, Limits()).start(HOST, port)


async def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(StartError, match="--host"):
        await Listener(World().routes, Limits()).start("192.0.2.1", 0)
    with pytest.raises(StartError, match="--host"):
        await Listener(World().routes, Limits()).start("no-such-host.invalid", 0)


@pytest.mark.parametrize("limits", [dataclasses.replace(Limits(), connections=2), dataclasses.replace(Limits(), per_address=2)])
async def test_connections_over_the_cap_are_told_503(limits: Limits) -> None:
    async with serving(World(limits=limits)) as listener:
        port = listener.address[1]
        pairs = [await asyncio.open_connection(HOST, port) for _ in range(2)]
        assert b"503" in await exchange(port, b"")
        for _, writer in pairs:
            writer.close()
            await writer.wait_closed()
        while listener.num_connections:
            await asyncio.sleep(0.001)
        assert b"200" in await exchange(port, get("/health"))


async def test_draining_lets_answers_end_and_probes_in() -> None:
    world = World(engine=ScriptedEngine(says(tokens("hello"), END), CONTEXT, is_manual=True))
    async with serving(world) as listener:
        port = listener.address[1]
        idle = asyncio.create_task(exchange(port, b""))
        running = asyncio.create_task(exchange(port, post("/v1/completions", {"prompt": "x", "stream": True})))
        while not world.engine.windows:
            await asyncio.sleep(0.001)
        world.site.is_draining = True
        drained = asyncio.create_task(listener.drain(60))
        assert await idle == b""
        assert b" 503 " in await exchange(port, get("/ready"))
        assert b" 503 " in await exchange(port, post("/v1/completions", {"prompt": "y"}))
        world.engine.is_manual = False
        world.engine.step()
        assert (await running).rstrip().endswith(b"data: [DONE]\n\n\r\n0")
        await drained


async def test_what_does_not_end_in_time_ends_with_an_error_event() -> None:
    world = World(engine=ScriptedEngine(says([], 5), CONTEXT, is_manual=True))
    async with serving(world) as listener:
        port = listener.address[1]
        running = asyncio.create_task(exchange(port, post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 50})))
        for _ in range(3):
            while not world.engine.windows:
                await asyncio.sleep(0.001)
            world.engine.step()
        await settle()
        await listener.drain(0)
        answer = await running
        assert b'"code":"draining"' in answer and b"data: [DONE]" in answer
        await listener.drain(0)
        await listener.close()


async def test_health_answers_while_the_workers_are_busy() -> None:
    world = World()
    release = threading.Event()
    async with serving(world) as listener:
        assert isinstance(world.site.executor, ThreadPoolExecutor)
        for _ in range(4):
            world.site.executor.submit(release.wait)
        waiting = asyncio.create_task(exchange(listener.address[1], post("/v1/completions", {"prompt": "x"})))
        assert b"200" in await asyncio.wait_for(exchange(listener.address[1], get("/health")), 5)
        assert not waiting.done()
        release.set()
        assert b"200" in await waiting


# ---------------------------------------------------------------- the official client


def in_thread(function: Any) -> Any:
    return asyncio.get_running_loop().run_in_executor(None, function)


def openai_client(port: int, **more: Any) -> Any:
    openai = pytest.importorskip("openai", reason="the official OpenAI client is not installed (pip install openai)")
    return openai.OpenAI(base_url=f"http://{HOST}:{port}/v1", api_key=more.pop("api_key", "unused"), max_retries=0, timeout=30, **more)


async def test_openai_client_completions_and_chat() -> None:
    async with serving(World()) as listener:
        client = openai_client(listener.address[1])
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]

        def use() -> None:
            with client:
                assert [model.id for model in client.models.list()] == ["tiny"]
                assert client.models.retrieve("tiny").owned_by == "strata"
                whole = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=5, seed=1, logprobs=2)
                assert [choice.text for choice in whole.choices] == ["hello", "hello"]
                assert whole.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4]
                pieces = client.completions.create(model="tiny", prompt="a", max_tokens=50, stream=True)
                assert "".join(piece.choices[0].text for piece in pieces) == "hello world"
                chat = client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=2)
                assert chat.choices[0].message.content == "hello world" and chat.choices[0].finish_reason == "stop"
                assert chat.usage.prompt_tokens_details.cached_tokens >= 0
                assert len(chat.choices[0].logprobs.content) == 12
                with client.chat.completions.stream(
                    model="tiny", messages=messages, n=2, stream_options={"include_usage": True}
                ) as stream:
                    final = stream.until_done().get_final_completion()
                assert [choice.message.content for choice in final.choices] == ["hello world"] * 2
                assert final.usage.completion_tokens == 24

        await in_thread(use)


async def test_openai_client_errors() -> None:
    openai = pytest.importorskip("openai", reason="the official OpenAI client is not installed (pip install openai)")
    world = World(settings=Settings(batch=4, api_key="right", strict_model=True))
    async with serving(world) as listener:
        right, wrong = openai_client(listener.address[1], api_key="right"), openai_client(listener.address[1], api_key="wrong")

        def use() -> None:
            with right, wrong:
                with pytest.raises(openai.AuthenticationError):
                    wrong.models.list()
                with pytest.raises(openai.NotFoundError) as missing:
                    right.completions.create(model="gpt-4o", prompt="x")
                assert missing.value.code == "model_not_found"
                with pytest.raises(openai.BadRequestError) as over:
                    right.completions.create(model="tiny", prompt="x", max_tokens=1000, stream=True)
                assert over.value.code == "context_length_exceeded"
                with pytest.raises(openai.BadRequestError) as bad:
                    right.completions.create(model="tiny", prompt="x", temperature=1e6)
                assert bad.value.param == "temperature"

        await in_thread(use)


async def test_openai_client_sees_a_failure_in_the_stream() -> None:
    openai = pytest.importorskip("openai", reason="the official OpenAI client is not installed (pip install openai)")
    world = World(engine=ScriptedEngine(says(tokens("hello"), END), CONTEXT, is_manual=True))
    async with serving(world) as listener:
        client = openai_client(listener.address[1])

        def use() -> None:
            with client, pytest.raises(openai.APIError):
                for _ in client.completions.create(model="tiny", prompt="x", stream=True):
                    pass

        done = in_thread(use)
        for n in range(3):
            while not world.engine.windows:
                await asyncio.sleep(0.001)
            if n < 2:
                world.engine.step()
        world.engine.fail("stage 0: lost")
        await done


async def test_a_hang_up_is_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    world = World(engine=ScriptedEngine(says([], 5), CONTEXT, is_manual=True))
    async with serving(world) as listener:
        _, writer = await asyncio.open_connection(HOST, listener.address[1])
        writer.write(post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 50}))
        while not world.engine.windows:
            await asyncio.sleep(0.001)
        writer.transport.abort()
        while world.manager.view().running:
            await asyncio.sleep(0.001)
            if world.engine.windows:
                world.engine.step()
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING]
