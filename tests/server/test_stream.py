"""A stream's life: silence, clients that leave or stall, errors before and after the 200, progress, shutdown."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest

from strata.config.settings import Settings
from strata.errors import Draining
from strata.server.limits import Limits
from strata.slots.policy import SlotPolicy
from tests.clock import JumpClock
from tests.server.harness import CONTEXT, END, ScriptedEngine, World, says, settle, tokens

PATH = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}


def manual(context: int = CONTEXT) -> World:
    return World(engine=ScriptedEngine(says(tokens("hello world"), END), context, is_manual=True))


async def run_windows(world: World, count: int) -> None:
    for _ in range(count):
        await settle()
        world.engine.step()
    await settle()


@pytest.mark.parametrize("path, more", [
    (PATH, {"prompt": "x"}), (PATH, {"prompt": ["x", "y"], "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_slots_within_a_window(path: str, more: dict[str, object], stream: bool) -> None:
    world = manual()
    client = world.connect()
    await client.start("POST", path, {**more, "max_tokens": 200, "ignore_eos": True, "stream": stream})
    await run_windows(world, 8)
    assert world.manager.view().running > 0
    client.leave()
    await settle()
    while world.engine.windows:
        world.engine.step()
        await settle()
    view = world.manager.view()
    assert view.running == view.waiting == view.windows_in_flight == 0
    assert view.counters.ended["cancelled"] > 0


async def test_a_client_that_leaves_while_its_prompt_is_read() -> None:
    world = manual()
    client = world.connect()
    await client.start("POST", PATH, {"prompt": "x" * 200, "stream": True})
    await run_windows(world, 1)
    seen = len(world.engine.seen)
    client.leave()
    await settle()
    while world.engine.windows:
        world.engine.step()
        await settle()
    assert len(world.engine.seen) == seen, "no further chunk was started"
    assert world.manager.view().running == 0


async def test_a_client_that_leaves_while_waiting_in_the_queue() -> None:
    world = manual()
    clients = [world.connect() for _ in range(5)]
    for n, client in enumerate(clients):
        await client.start("POST", PATH, {"prompt": f"{n}"})
    await settle()
    assert world.manager.view().waiting == 1
    clients[4].leave()
    await settle()
    assert world.manager.view().waiting == 0 and world.manager.view().running == 4


async def test_leaving_is_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    world = manual()
    client = world.connect()
    await client.start("POST", PATH, LONG)
    await run_windows(world, 3)
    client.leave()
    await run_windows(world, 1)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("strata")]
    assert len(lines) == 1 and "end=abort" in lines[0] and "generated=3" in lines[0] and "slot=0" in lines[0]


async def test_silence_is_filled_with_comments(jump_clock: JumpClock) -> None:
    world = manual()
    client = world.connect()
    await client.start("POST", PATH, {"prompt": "x", "stream": True, "max_tokens": 5})
    await client.until_sent(b": keep-alive\n\n")
    assert jump_clock.now == pytest.approx(15)
    jump_clock.advance(15.1)
    await settle()
    assert client.transport.sent.count(b": keep-alive\n\n") == 2
    await run_windows(world, 5)
    answer = await client.answer()
    assert "".join(event["choices"][0]["text"] for event in answer.events) == "hello"


async def test_comments_can_be_off(jump_clock: JumpClock) -> None:
    world = manual()
    world.site.settings = Settings(batch=4, sse_keep_alive_s=0)
    client = world.connect()
    await client.start("POST", PATH, {"prompt": "x", "stream": True})
    await settle()
    jump_clock.advance(1000)
    await settle()
    assert not client.transport.sent


async def test_a_reader_that_stalls_is_cancelled(jump_clock: JumpClock) -> None:
    world = World(
        engine=ScriptedEngine(says([], tokens("x")[0]), 4096, is_manual=True),
        limits=dataclasses.replace(Limits(), write_bytes=100_000),
    )
    client = world.connect()
    client.transport.stalled = True
    await client.start("POST", PATH, {**LONG, "max_tokens": 4000})
    for _ in range(3000):
        if client.transport.is_closed:
            break
        await settle(3)
        if world.engine.windows:
            world.engine.step()
    assert client.transport.is_closed and client.transport.waiting < 110_000
    await settle()
    while world.engine.windows:
        world.engine.step()
        await settle()
    assert world.manager.view().running == 0


async def test_a_reader_that_takes_nothing_for_the_timeout_is_cut_off(jump_clock: JumpClock) -> None:
    world = manual()
    client = world.connect()
    await client.start("POST", PATH, LONG)
    await settle()
    client.transport.stalled = True
    client.transport.waiting = 70_000
    client.connection.pause_writing()
    jump_clock.advance(59)
    await settle()
    client.transport.read_some(1)
    jump_clock.advance(2)
    await settle()
    assert not client.transport.is_closed, "it had taken a byte"
    jump_clock.advance(60)
    await settle()
    assert client.transport.is_closed


# ---------------------------------------------------------------- errors


async def test_a_failure_before_the_first_token_has_its_status() -> None:
    world = manual()
    client = world.connect()
    await client.start("POST", PATH, LONG)
    await settle()
    world.engine.fail("stage 0: out of memory")
    answer = await client.answer()
    assert answer.status == 500 and answer.error["type"] == "engine_error"


async def test_a_failure_after_it_is_an_event() -> None:
    world = manual()
    client = world.connect()
    await client.start("POST", PATH, {**LONG, "n": 2})
    await run_windows(world, 5)
    world.engine.fail("stage 0: out of memory")
    answer = await client.answer()
    assert answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")
    assert answer.events[-1]["error"]["type"] == "engine_error"
    assert not any(event["choices"][0]["finish_reason"] for event in answer.events[:-1])
    while world.engine.windows:
        world.engine.step()
        await settle()
    assert world.manager.view().running == 0, "the other choice is cancelled too"


async def test_a_full_queue_is_503_with_retry_after() -> None:
    world = World(
        engine=ScriptedEngine(says([], 5), CONTEXT, is_manual=True), policy=SlotPolicy(slots=1, queue_limit=1), settings=Settings(batch=1)
    )
    for n in range(2):
        await world.connect().start("POST", PATH, {**LONG, "prompt": f"{n}"})
    await settle()
    answer = await world.post(PATH, LONG)
    assert answer.status == 503 and answer.error["code"] == "queue_full" and int(answer.headers["retry-after"]) >= 1
    view = world.manager.view()
    assert (view.running, view.waiting) == (1, 1)


async def test_waiting_too_long_is_503_although_a_stream_was_asked(jump_clock: JumpClock) -> None:
    world = World(
        engine=ScriptedEngine(says([], 5), CONTEXT, is_manual=True), settings=Settings(batch=1, sse_keep_alive_s=0),
        policy=SlotPolicy(slots=1, queue_limit=5, queue_timeout=20),
    )
    await world.connect().start("POST", PATH, LONG)
    await settle()
    answer = await world.post(PATH, {**LONG, "prompt": "y"})
    assert answer.status == 503 and jump_clock.now == pytest.approx(20)


async def test_too_many_choices_for_the_queue_leave_nothing_behind() -> None:
    world = World(engine=ScriptedEngine(says([], 5), CONTEXT, is_manual=True), policy=SlotPolicy(slots=1, queue_limit=2))
    answer = await world.post(PATH, {**LONG, "n": 8})
    assert answer.status == 503
    await settle()
    while world.engine.windows:
        world.engine.step()
        await settle()
    view = world.manager.view()
    assert (view.running, view.waiting) == (0, 0)


async def test_a_bug_is_500_with_the_request_id_and_nothing_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()

    def broken(*arguments: object, **named: object) -> None:
        raise ZeroDivisionError("secret prompt text")

    monkeypatch.setattr("strata.server.admission.read_prompts", broken)
    answer = await world.post(PATH, {"prompt": "x"}, X_Request_ID="job-1")
    assert answer.status == 500 and "job-1" in answer.error["message"] and "secret" not in answer.body.decode()
    assert "ZeroDivisionError" in caplog.text
    assert (await world.get("/health")).status == 200


# ---------------------------------------------------------------- progress, stop, shutdown


async def test_progress_is_told_when_asked() -> None:
    events = (await World().post(PATH, {"prompt": "x" * 100, "stream": True, "return_progress": True, "max_tokens": 2})).events
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert [each["total"] for each in progress] == [100] * len(progress)
    assert progress[-1]["processed"] == 100 and len(progress) >= 4
    assert "".join(event["choices"][0]["text"] for event in events) == "he"


async def test_a_stop_string_stops_the_engine() -> None:
    world = World()
    body = (await world.post(PATH, {"prompt": "x", "stop": "o w", "max_tokens": 200})).json
    assert body["choices"][0]["text"] == "hell"
    assert len(world.engine.seen) <= len(tokens("hello w")) + 2
    assert world.manager.view().running == 0


async def test_interrupted_streams_end_with_an_error_event() -> None:
    world = manual()
    streamed, waiting, idle = world.connect(), world.connect(), world.connect()
    await idle.request("GET", "/health")
    await streamed.start("POST", PATH, LONG)
    await run_windows(world, 3)
    await waiting.start("POST", PATH, {"prompt": "y"})
    await settle()
    for client in (streamed, waiting, idle):
        client.connection.interrupt(Draining("the server is shutting down"))
    await settle()
    events = (await streamed.answer()).events
    assert events[-1]["error"]["code"] == "draining"
    refused = await waiting.answer()
    assert refused.status == 503 and refused.error["code"] == "draining"
    assert all(client.transport.is_closed for client in (streamed, waiting, idle))
    while world.engine.windows:
        world.engine.step()
        await settle()
    assert world.manager.view().running == 0


async def test_tokens_of_one_turn_leave_in_one_write() -> None:
    world = manual()
    client = world.connect()
    await client.start("POST", PATH, {"prompt": "x", "max_tokens": 1, "stream": True})
    await settle()
    writes: list[bytes] = []
    original = client.transport.write
    client.transport.write = lambda data: (writes.append(bytes(data)), original(data))[1]  # type: ignore[assignment]
    world.engine.step()
    await settle()
    assert len(writes) == 2, "head, text, finish and [DONE] in one, the end of the chunked body in another"
    answer = await client.answer()
    assert json.loads(answer.body.split(b"\n\n")[0].removeprefix(b"data: "))["choices"][0]["text"] == "h"
