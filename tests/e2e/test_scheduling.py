"""Who waits for whom: the queue's cap, clients that leave, prompts in chunks between the others' tokens."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.e2e.serving import COMPLETIONS, Served, assert_same, cold, completion, serving, some_tokens

LONG = 600  # tokens of an answer that is still running when its test has seen enough


async def until_idle(served: Served) -> None:
    view = await served.until(lambda view: not view.running and not view.waiting and not view.windows_in_flight)
    assert view.pages_busy == 0
    served.manager.machine.check_integrity()


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async with serving(batch=1, queue_size=1) as served:
        running = await (await served.stream(some_tokens(5), LONG)).until(1)
        waiting = await served.stream(some_tokens(6, 1), 4)
        await served.until(lambda view: view.waiting == 1)
        for stream in (True, False):
            refused = await served.call("POST", COMPLETIONS, completion(some_tokens(7, 2), 4, stream=stream))
            assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
            error = (await refused.json())["error"]
            assert (error["type"], error["code"]) == ("overloaded_error", "queue_full")
        running.leave()
        assert len((await waiting.finish()).tokens) == 4
        await until_idle(served)


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_leaves_frees_its_slot_within_a_window(streams: bool) -> None:
    """B8. Another answer keeps windows coming: a few turns of the loop after the client has gone its row is in none of them."""
    async with serving() as served:
        tap = served.tap()
        other = await (await served.stream(some_tokens(5), LONG)).until(1)
        leaving = await served.open("POST", COMPLETIONS, completion(some_tokens(9, 1), LONG, stream=streams))
        view = await served.until(lambda view: sum(slot.generated > 5 for slot in view.slots) == 2)
        request_id = next(slot.request_id for slot in view.slots if slot.request_id not in ("", other.id + "-0"))
        sent = len(tap.log)
        leaving.leave()
        while any(slot["id_task"] == request_id for slot in await served.get("/slots")):
            await other.next()
        assert tap.log.index(("cancel", request_id)) - sent <= 5
        assert tap.after_cancel(request_id) == []
        other.leave()
        await until_idle(served)
        assert served.view().counters.ended == {"stop": 0, "length": 0, "cancelled": 2, "failed": 0}


async def test_a_client_that_leaves_while_its_prompt_is_read() -> None:
    """B9: the chunk in flight is the last one."""
    async with serving(chunk=128) as served:
        tap = served.tap()
        tap.hold()
        call = await served.open("POST", COMPLETIONS, completion(some_tokens(900), 4))
        await served.until(lambda view: view.windows_in_flight == 1)
        call.leave()
        await served.until(lambda view: any(kind == "cancel" for kind, _ in tap.log))
        tap.release()
        await until_idle(served)
        assert [len(window.segments[0].tokens) for window in tap.windows] == [128]
        assert (await served.complete(some_tokens(900), 4)).tokens == (await cold(some_tokens(900), 4)).tokens


async def test_a_client_that_leaves_the_queue() -> None:
    async with serving(batch=1) as served:
        tap = served.tap()
        running = await (await served.stream(some_tokens(5), LONG)).until(1)
        waiting = await served.stream(some_tokens(6, 1), 4)
        await served.until(lambda view: view.waiting == 1)
        waiting.leave()
        await served.until(lambda view: view.waiting == 0)
        assert {row.request_id for window in tap.windows for row in window.segments} == {running.id + "-0"}
        running.leave()
        await until_idle(served)


async def test_impatient_retries_do_not_wedge_the_server() -> None:
    """A21: five tries that give up while the prompt is read, health asked all along, then one that waits."""
    prompt = some_tokens(900)
    async with serving(batch=2, chunk=128) as served:
        tap = served.tap()
        for _ in range(5):
            tap.hold()
            call = await served.open("POST", COMPLETIONS, completion(prompt, 4))
            seen = len(tap.windows)
            await served.until(lambda view: view.running + view.waiting > 0 and len(tap.windows) >= seen)
            call.leave()
            tap.release()
            assert await served.get("/health") == {"status": "ok"}
        result = await served.complete(prompt, 4)
        await until_idle(served)
    assert_same(result, await cold(prompt, 4))


async def test_decoders_get_their_windows_between_the_chunks_of_a_prompt() -> None:
    """M7: three answers run while a long prompt is read; their longest pause is one chunk, and then half of its time is theirs."""
    async with serving(chunk=128, batch_decode_share=0.5) as served:
        tap = served.tap()
        streams = [await served.stream(some_tokens(5 + seed, seed), LONG) for seed in range(3)]
        await asyncio.gather(*(stream.until(1) for stream in streams))
        begin = len(tap.windows)
        await served.complete(some_tokens(900, 7), 1)
        windows = tap.windows[begin:]
        for stream in streams:
            stream.leave()
        await until_idle(served)
    chunks = [place for place, window in enumerate(windows) if window.kind == "prompt"]
    assert len(chunks) == 8
    for one, next_one in zip(chunks, chunks[1:]):
        between = windows[one + 1:next_one]
        assert all(len(window.segments) == 3 for window in between)
        assert sum(tap.seconds[window.id] for window in between) >= 0.5 * tap.seconds[windows[one].id] > 0


async def test_a_short_prompt_overtakes_a_long_one() -> None:
    async with serving(chunk=128) as served:
        tap = served.tap()
        tap.hold()
        long = await served.stream(some_tokens(900), 2)
        await served.until(lambda view: view.windows_in_flight == 1)
        short = await served.stream(some_tokens(20, 1), 2)
        await served.until(lambda view: view.running == 2)
        tap.release()
        await asyncio.gather(long.finish(), short.finish())
    order = [window.segments[0].request_id for window in tap.windows if window.kind == "prompt"]
    assert order == [long.id + "-0", short.id + "-0", *[long.id + "-0"] * 7]


async def test_answers_that_end_in_another_order_than_they_began() -> None:
    """M5. Each gets its own tokens."""
    lengths = (45, 10, 27, 2)
    async with serving(batch_decode_share=0.0) as served:
        tap = served.tap()
        tap.hold()
        streams = [await served.stream(some_tokens(4 + place, place), length) for place, length in enumerate(lengths)]
        await served.until(lambda view: view.running == 4)
        tap.release()
        answers = [(await stream.finish()).tokens for stream in streams]
    last = {row.request_id: window.id for window in tap.windows for row in window.segments}
    assert sorted(range(4), key=lambda place: last[streams[place].id + "-0"]) == [3, 1, 2, 0]
    for place, length in enumerate(lengths):
        assert answers[place] == (await cold(some_tokens(4 + place, place), length)).tokens


async def test_a_short_and_a_long_prompt_together() -> None:
    """M8."""
    prompts = [some_tokens(5), some_tokens(500, 1)]
    async with serving() as served:
        results = await asyncio.gather(*(served.complete(prompt, 8) for prompt in prompts))
        assert await served.get("/health") == {"status": "ok"}
    for prompt, result in zip(prompts, results):
        assert_same(result, await cold(prompt, 8))


async def test_more_clients_than_slots_are_all_served_in_turn() -> None:
    async with serving(batch=2, queue_size=64) as served:
        results = await asyncio.gather(*(served.complete(some_tokens(4, seed), 3) for seed in range(30)))
        assert [len(result.tokens) for result in results] == [3] * 30
        await until_idle(served)


async def test_a_crowd_on_eight_bit_caches() -> None:
    """A32: two hundred at once, with one beginning, more than the queue holds: 503 or the answer, and nothing else."""
    prompts = [[*some_tokens(70), 3 + number] for number in range(200)]
    async with serving(kv="int8", queue_size=100) as served:
        calls = [await served.open("POST", COMPLETIONS, completion(prompt, 2)) for prompt in prompts]
        served_ids, statuses = [], [(await call.answered()).status for call in calls]
        for call, status in zip(calls, statuses):
            body = await call.json()
            if status == 200:
                served_ids.append(body["id"])
            else:
                assert (status, body["error"]["code"]) == (503, "queue_full")
        assert statuses.count(200) >= 100 and statuses.count(503) > 0
        assert len(set(served_ids)) == len(served_ids)
        await until_idle(served)


async def test_health_answers_while_much_text_is_tokenised_and_a_long_prompt_read() -> None:
    """Nothing heavy runs on the loop thread. A median, so that one busy moment of the machine is no fault."""
    loop = asyncio.get_running_loop()
    text = json.dumps({"content": "What is heavy? " * 30_000}).encode()
    times = []
    async with serving(context=4096) as served:
        tokenised = asyncio.ensure_future(served.post("/tokenize", text))
        read = asyncio.ensure_future(served.complete(some_tokens(2500), 1))
        while not (tokenised.done() and read.done()):
            begin = loop.time()
            await served.get("/health")
            times.append(loop.time() - begin)
        assert len(tokenised.result()["tokens"]) == 30_000 * len("What is heavy? ") and len(read.result().tokens) == 1
    assert sorted(times)[len(times) // 2] < 0.1
