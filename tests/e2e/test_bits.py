"""Promise 1 over HTTP: a request's tokens, and every float of its logprobs, are the same bits whatever runs beside it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.client import Result
from tests.e2e.serving import COMPLETIONS, Served, cold, completion, serving, some_tokens

LENGTHS = (300, 150, 129, 64, 40, 17, 3, 1)  # within a page, over one, on the grid of prompts and beside it
PROMPTS = [some_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
GREEDY: dict[str, Any] = {}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 7}


def answer_length(place: int) -> int:
    """Those that begin first go on for longest."""
    return 4 + 3 * (len(PROMPTS) - place)


async def staggered(served: Served, samplings: list[dict[str, Any]]) -> list[Result]:
    """All prompts at once, but each begins when the one before has answered some tokens, another number each time."""
    streams = []
    for place, (prompt, sampling) in enumerate(zip(PROMPTS, samplings)):
        streams.append(await served.stream(prompt, answer_length(place), **sampling))
        if place + 1 < len(PROMPTS):
            await streams[-1].until(1 + place % 3)
    return list(await asyncio.gather(*(stream.finish() for stream in streams)))


@pytest.mark.parametrize("settings, first, second", [
    ({}, GREEDY, SEEDED), ({"kv": "int8", "threads": 3}, SEEDED, GREEDY), ({"deterministic": True, "chunk": 128}, GREEDY, SEEDED),
], ids=str)
async def test_alone_or_with_seven_others(settings: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    samplings = [first, second] * (len(PROMPTS) // 2)
    async with serving(batch_decode_share=0.0, **settings) as served:
        tap = served.tap()
        together = await staggered(served, samplings)
    assert max(len(window.segments) for window in tap.windows) > 4, "they did not run together"
    for place, (result, sampling) in enumerate(zip(together, samplings)):
        alone = await cold(PROMPTS[place], answer_length(place), settings, **sampling)
        assert len(result.tokens) == len(result.logprobs) == answer_length(place)
        assert result.bits == alone.bits


@pytest.mark.parametrize("slot", [0, 3, 7])
async def test_in_any_slot(slot: int) -> None:
    async with serving() as served:
        result = await served.complete(PROMPTS[1], id_slot=slot, **SEEDED)
        assert served.view().slots[slot].tokens >= len(PROMPTS[1])
    assert result.bits == (await cold(PROMPTS[1], **SEEDED)).bits


async def test_a_seeded_answer_does_not_depend_on_an_unseeded_one_beside_it() -> None:
    """F1."""
    seeded = {"temperature": 1, "seed": 7}
    async with serving() as served:
        first, _ = await asyncio.gather(
            served.complete(PROMPTS[2], **seeded), served.complete(PROMPTS[2][:-1] + [9], 40, temperature=1),
        )
        again = await served.complete(PROMPTS[2], cache_prompt=False, **seeded)
    assert first.bits == again.bits


async def test_without_a_seed_equal_requests_get_different_answers() -> None:
    """F3. And the seed that was drawn comes back, and gives the same answer again."""
    async with serving() as served:
        bodies = await asyncio.gather(*(ask(served, temperature=1) for _ in range(4)))
        answers = [tuple(body["choices"][0]["token_ids"]) for body in bodies]
        again = await ask(served, temperature=1, seed=bodies[0]["seed"])
    assert len(set(answers)) == 4
    assert len({body["seed"] for body in bodies}) == 4
    assert tuple(again["choices"][0]["token_ids"]) == answers[0]


async def test_choices_differ_and_each_is_what_it_is_alone() -> None:
    async with serving() as served:
        several = (await ask(served, temperature=1, seed=3, n=4))["choices"]
        one = (await ask(served, temperature=1, seed=3))["choices"][0]
    assert len({tuple(choice["token_ids"]) for choice in several}) == 4
    assert several[0]["token_ids"] == one["token_ids"]


async def ask(served: Served, **more: Any) -> Any:
    return await served.post(COMPLETIONS, completion(some_tokens(20), 16, **more))


@pytest.mark.parametrize("rows", [1, 3, 8])
async def test_rows_that_join_while_others_decode(rows: int) -> None:
    """M3: windows of so many rows, which one more row joins."""
    prompts = [some_tokens(5 + seed, seed) for seed in range(rows + 1)]
    async with serving(batch=9) as served:
        streams = [await served.stream(prompt, 14) for prompt in prompts[:rows]]
        await asyncio.gather(*(stream.until(2) for stream in streams))
        joined = await served.complete(prompts[-1], 14)
        results = [await stream.finish() for stream in streams]
    for prompt, result in zip(prompts, [*results, joined]):
        async with serving() as served:
            assert result.bits == (await served.complete(prompt, 14)).bits


async def test_sixteen_prompts_at_once_each_get_their_own_answer() -> None:
    """A18, with half of them waiting for a slot."""
    async with serving() as served:
        results = await asyncio.gather(*(served.complete(f"Item {number}: tell me", 8) for number in range(1, 17)))
    assert len({tuple(result.tokens) for result in results}) > 8
    async with serving(batch=1) as served:
        for number, result in enumerate(results, 1):
            alone = await served.complete(f"Item {number}: tell me", 8, cache_prompt=False)
            assert result.bits == alone.bits
