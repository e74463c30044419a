"""Real sockets on a free port: start, caps, draining, crowds."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from strata.errors import StartError
from strata.server.limits import Limits
from strata.server.listener import Listener
from strata.slots import SlotPolicy
from tests.server.harness import CONTEXT, END, ScriptedEngine, World, says, settle, tokens
from tests.server.sockets import HOST, serving


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


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a..b", "a" * 64])
async def test_a_host_that_is_not_ours(host: str) -> None:
    with pytest.raises(StartError, match="--host"):
        await Listener(World().routes, Limits()).start(host, 0)


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


async def test_a_crowd_of_which_a_third_leaves() -> None:
    world = World(engine=ScriptedEngine(says(tokens("hello " * 20), END), CONTEXT), policy=SlotPolicy(slots=4, queue_limit=200))
    chance = random.Random(5)

    async def use(port: int, n: int) -> bool:
        reader, writer = await asyncio.open_connection(HOST, port)
        body = {"prompt": f"{n} asks", "stream": bool(n % 2), "max_tokens": 60, "n": 1 + n % 3}
        writer.write(post("/v1/completions", body))
        leaves = chance.random() < 0.33
        answer = await (reader.read(chance.randrange(1, 3000)) if leaves else reader.read())
        writer.close()
        await writer.wait_closed()
        return leaves or answer.startswith(b"HTTP/1.1 200") and b'"length"' in answer

    async with serving(world) as listener:
        assert all(await asyncio.gather(*(use(listener.address[1], n) for n in range(60))))
        while listener.num_connections or world.manager.view().running:
            await asyncio.sleep(0.001)
        view = world.manager.view()
        assert view.waiting == view.windows_in_flight == 0
        world.machine.check_integrity()
    lines = world.metrics.render("")[0].decode().splitlines()
    ended = [float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total{")]
    assert sum(ended) == sum(1 + n % 3 for n in range(60)) and ended[2] > 0, "each counted once, aborts too"


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
