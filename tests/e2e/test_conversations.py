"""What is held of a conversation is read no second time, is counted truly, and changes no token.

A conversation goes on at its end, or where it diverges from what is held: there at the last whole page before.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.client import Result
from tests.e2e.serving import Served, Tap, assert_same, cold, serving, some_tokens

PAGE = 64
EVERY_WAY: list[dict[str, Any]] = [{}, {"kv": "int8"}, {"deterministic": True}]
# Where a history is kept whose seat is needed: among the pages, nowhere, in host memory.
KEEPING: list[dict[str, Any]] = [{}, {"shelf": False}, {"shelf": False, "conversation_cache_mib": 64}]


def read_of(tap: Tap, request_id: str) -> list[int]:
    """The positions that were read of a request's prompt."""
    rows = [row for window in tap.windows if window.kind == "prompt" for row in window.segments if row.request_id == request_id]
    return [position for row in rows for position in range(row.start, row.end)]


async def check(result: Result, prompt: Any, settings: dict[str, Any], **more: Any) -> None:
    """Like a fresh server's answer: to the bit under ``deterministic``, by the gap rule otherwise."""
    oracle = await cold(prompt, len(result.tokens), settings, **more)
    if settings.get("deterministic"):
        assert result.bits == oracle.bits
    else:
        assert_same(result, oracle)


@pytest.mark.parametrize("settings", EVERY_WAY, ids=str)
async def test_only_the_new_part_of_the_next_turn_is_read(settings: dict[str, Any]) -> None:
    first_prompt = some_tokens(200)
    async with serving(**settings) as served:
        tap = served.tap()
        first = await served.complete(first_prompt)
        second_prompt = [*first_prompt, *first.tokens, *some_tokens(40, 1)]
        second = await (await served.stream(second_prompt)).finish()
        request_id = tap.windows[-1].segments[0].request_id
    held = 200 + 16 - 1  # the last token was picked and never read
    assert (first.cached, second.cached) == (0, held)
    assert second.timings["cache_n"] == held and second.timings["prompt_n"] == 256 - held
    assert read_of(tap, request_id) == list(range(held, 256))
    await check(second, second_prompt, settings)


@pytest.mark.parametrize("settings", EVERY_WAY, ids=str)
async def test_the_same_prompt_again_and_again(settings: dict[str, Any]) -> None:
    """A29, A28. A hit and a miss give the same answer."""
    prompt = some_tokens(150)
    async with serving(**settings) as served:
        results = [await served.complete(prompt) for _ in range(3)]
        refused = await served.complete(prompt, cache_prompt=False)
    assert [result.cached for result in [*results, refused]] == [0, 128, 128, 0]
    for result in results:
        await check(result, prompt, settings)


def says(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


async def test_a_chat_of_several_turns_reads_each_turn_once(tiny_chat: Any) -> None:
    """The client sends its answers back as text, whose tokens need not be those that were picked."""
    settings = {"model": tiny_chat}
    messages = [says("system", "You are short. " * 8)]
    async with serving(**settings) as served:
        anchors = []
        for turn in range(4):
            messages.append(says("user", f"Question {turn}: why?"))
            result = await served.complete(messages, 12)
            await check(result, messages, settings)
            anchors.append(await prompt_length(served, messages))
            assert result.cached >= (anchors[turn - 1] // PAGE * PAGE if turn else 0)
            messages.append(says("assistant", result.text))
        assert served.view().counters.reuse["continued"] == 3


async def prompt_length(served: Served, messages: Any) -> int:
    """Tokens up to the end of the last user turn."""
    body = await served.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    return int(body["count"])


async def test_a_tool_call_sent_back_in_other_words(tiny_chat: Any) -> None:
    """A7, first variant: key order and blanks of the arguments differ, what stands before them is reused."""
    tools = [{"type": "function", "function": {"name": "plot", "parameters": {"type": "object"}}}]
    asked = [says("user", "Plot it, please. " * 8)]

    def called(arguments: str) -> dict[str, Any]:
        call = {"id": "c1", "type": "function", "function": {"name": "plot", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    first = [*asked, called('{"x":1,"y":[2]}'), says("tool", "done"), says("user", "Thanks. More?")]
    second = [*asked, called('{ "y": [2], "x": 1 }'), says("tool", "done"), says("user", "Thanks. More?")]
    async with serving(model=tiny_chat) as served:
        before = await prompt_length(served, asked)
        await served.complete(first, tools=tools)
        result = await served.complete(second, tools=tools)
    assert result.cached >= before // PAGE * PAGE > 0
    await check(result, second, {"model": tiny_chat}, tools=tools)


@pytest.mark.parametrize("keeping", KEEPING, ids=str)
async def test_finished_chats_do_not_leak_into_new_ones(keeping: dict[str, Any]) -> None:
    """A1, first variant: twelve chats on two slots, then pairs of others at once."""
    markers = ["Marker LARCH-01. Continue.", "Marker BIRCH-01. Continue."]
    oracles = [await cold(marker, 8) for marker in markers]
    async with serving(batch=2, **keeping) as served:
        for number in range(12):
            await served.complete(f"Chat {number} is about tides, and rocks.", 4)
        for _ in range(8):
            results = await asyncio.gather(*(served.complete(marker, 8) for marker in markers))
            for result, oracle in zip(results, oracles):
                assert_same(result, oracle)
                assert result.cached == 0, "they share less than a page with anybody"


@pytest.mark.parametrize("keeping", KEEPING, ids=str)
async def test_a_chat_that_shares_nothing_takes_the_only_slot(keeping: dict[str, Any]) -> None:
    """A2, A3: there is no match, so nothing is kept of what the slot held."""
    tides, other = some_tokens(120, 1), some_tokens(90, 2)
    async with serving(batch=1, **keeping) as served:
        await served.complete(tides)
        result = await served.complete(other)
    assert result.cached == 0
    await check(result, other, {})


async def test_strangers_with_the_same_system_prompt() -> None:
    """A9: each keeps its own conversation; of the shared part whole pages are borrowed."""
    system = some_tokens(200)
    prompts = [[*system, *some_tokens(20, 1)], [*system, *some_tokens(25, 2)]]
    async with serving(batch=2) as served:
        first = [await served.complete(prompt) for prompt in prompts]
        nexts = [[*prompt, *result.tokens, *some_tokens(10, 3)] for prompt, result in zip(prompts, first)]
        second = [await served.complete(prompt) for prompt in nexts]
    assert [result.cached for result in first] == [0, 200 // PAGE * PAGE]
    assert [result.cached for result in second] == [len(prompt) - 11 for prompt in nexts]
    for prompt, result in zip([*prompts, *nexts], [*first, *second]):
        await check(result, prompt, {})


async def test_two_streams_with_one_beginning_and_different_ends() -> None:
    """A22: at once; the shared part is read once, and nobody writes into the other's cache."""
    shared = some_tokens(300)
    prompts = [[*shared, *some_tokens(9, 1)], [*shared, *some_tokens(30, 2)]]
    async with serving() as served:
        tap = served.tap()
        results = await asyncio.gather(*(served.complete(prompt) for prompt in prompts))
    read = sum(len(row.tokens) for window in tap.windows if window.kind == "prompt" for row in window.segments)
    assert read == 309 + 330 - 300 // PAGE * PAGE
    for prompt, result in zip(prompts, results):
        await check(result, prompt, {})


async def test_equal_requests_at_once_get_an_answer_each() -> None:
    """A10: four of them, with memory for little more than one context."""
    body = {"context": 128, "kv_memory_mib": 1}
    prompt = some_tokens(50)
    async with serving(**body) as served:
        streams = [await served.stream(prompt, 40) for _ in range(4)]
        results = [await stream.finish() for stream in streams]
    assert len({stream.id for stream in streams}) == 4
    oracle = await cold(prompt, 40, body)
    for result in results:
        assert_same(result, oracle)


@pytest.mark.parametrize("keeping", KEEPING, ids=str)
async def test_side_requests_cost_a_chat_nothing(keeping: dict[str, Any]) -> None:
    """A12: title, tags and follow-ups of a chat, with their instruction before the whole of it, then its next turn."""
    chat = some_tokens(210)
    async with serving(batch=4, **keeping) as served:
        for turn in range(3):
            result = await served.complete(chat, 8)
            chat += [*result.tokens, *some_tokens(12, turn)]
        for kind in range(3):
            await served.complete([*some_tokens(15, 10 + kind), *chat], 4)
        fourth = await served.complete(chat, 8)
    assert fourth.cached == len(chat) - 12 - 1
    await check(fourth, chat, {})


@pytest.mark.parametrize("keeping, reuse", [(KEEPING[0], "continued"), (KEEPING[2], "restored")], ids=str)
async def test_two_chats_in_turns_on_one_slot(keeping: dict[str, Any], reuse: str) -> None:
    """A8: losing the seat is not losing the history."""
    chats = [some_tokens(130, 1), some_tokens(140, 2)]
    async with serving(batch=1, **keeping) as served:
        for _ in range(3):
            for chat in chats:
                result = await served.complete(chat, 8)
                chat += [*result.tokens, *some_tokens(10, 5)]
        counts = served.view().counters.reuse
    assert counts == {"continued": 0, "borrowed": 0, "restored": 0, "none": 2, reuse: 4}
    await check(result, chats[1][:-18], {})
