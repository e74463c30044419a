"""What prompts share is read once and changes no bit; who loses a slot to a side request is a setting, in a config's env block too."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from strata.app import slot_policy
from strata.config import Settings, load
from strata.errors import StartError
from strata.messages import EngineFacts
from strata.slots.events import Trace
from tests.e2e.serving import TINY, assert_same, cold, serving, some_tokens
from tools import replay

PAGE = 64
BASE = some_tokens(300)


async def test_four_thousand_shared_tokens_are_read_once() -> None:
    system = some_tokens(4000)
    prompts = [[*system, *some_tokens(20, 1)], [*system, *some_tokens(33, 2)]]
    sizes: dict[str, Any] = {"context": 4096}
    async with serving(**sizes) as served:
        tap = served.tap()
        results = await asyncio.gather(*(served.complete(prompt) for prompt in prompts))
        read = sum(len(row.tokens) for window in tap.windows if window.kind == "prompt" for row in window.segments)
        following = [*prompts[0], *results[0].tokens, *some_tokens(10, 3)]
        next_turn = await served.complete(following)
    shared = 4000 // PAGE * PAGE
    assert sorted(result.cached for result in results) == [0, shared] and read == 4020 + 4033 - shared
    assert next_turn.cached == len(following) - 11, "the second has not taken the first one's conversation"
    for prompt, result in zip(prompts, results):
        assert_same(result, await cold(prompt, settings=sizes))


@pytest.mark.parametrize(("prompt", "cached"), [
    *(pytest.param([*BASE[:PAGE + more], *some_tokens(40, 9)], PAGE if more >= 0 else 0, id=f"page{more:+}") for more in (-1, 0, 1)),
    pytest.param(BASE, 4 * PAGE, id="again"),
    pytest.param(BASE[:2 * PAGE], PAGE, id="exactly two pages"),
    pytest.param([*BASE[:100], 7, *BASE[101:]], PAGE, id="edited"),
])
async def test_a_hit_has_the_bits_of_a_cold_read(prompt: list[int], cached: int) -> None:
    async with serving(deterministic=True) as served:
        await served.complete(BASE)
        result = await served.complete(prompt)
    assert result.cached == cached
    assert result.bits == (await cold(prompt, settings={"deterministic": True})).bits


async def test_equal_requests_at_once_have_the_bits_of_a_cold_read() -> None:
    async with serving(deterministic=True) as served:
        results = await asyncio.gather(*(served.complete(BASE) for _ in range(4)))
    assert sorted(result.cached for result in results) == [0, *[4 * PAGE] * 3]
    oracle = await cold(BASE, settings={"deterministic": True})
    assert all(result.bits == oracle.bits for result in results)


def configured(folder: Path, **env: str) -> dict[str, Any]:
    """What a config with this ``env`` block sets, beside few slots whose histories are lost with them."""
    config = folder / "strata.json"
    slots = {"batch": 3, "batch_groups": 1, "shelf": False, "conversation_cache_mib": 0}
    config.write_text(json.dumps({"model": str(TINY), **slots, "env": env}))
    return vars(load(["--config", str(config)], {}).settings)


async def test_a_servers_own_trace_can_be_replayed_and_has_no_text(tmp_path: Path) -> None:
    path = tmp_path / "slots.jsonl"
    async with serving(slot_trace=path) as served:
        first = await served.complete(BASE)
        second = await served.complete([*BASE, *first.tokens, *some_tokens(10, 3)])
    visits = replay.read(path, replay.Maker(1))
    assert [len(visit.prompt) for visit in visits] == [300, 326]
    assert [json.loads(line)["cached"] for line in path.read_text().splitlines()] == [0, second.cached]
    assert set(json.loads(path.read_text().splitlines()[0])) == {field.name for field in fields(Trace)}


async def test_a_trace_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="slot_trace"):
        async with serving(slot_trace=tmp_path / "no folder" / "x"):
            pass


def test_host_memory_for_conversations_is_a_quarter_of_what_is_free_unless_said_otherwise() -> None:
    facts = EngineFacts(8, 4, 32)
    sizes = [slot_policy(Settings(conversation_cache_mib=asked), facts, 8 << 30).cache_bytes for asked in (None, 0, 5)]
    assert sizes == [2 << 30, 0, 5 << 20]


@pytest.mark.parametrize(
    ("env", "kept"), [({"STRATA_SLOT_EXPIRE_S": "600"}, "A"), ({"STRATA_SLOT_EXPIRE_S": "0"}, "B"), ({}, "B")], ids=str,
)
async def test_whom_a_side_request_displaces(env: dict[str, str], kept: str, tmp_path: Path) -> None:
    chats = {"A": some_tokens(500, 1), "B": some_tokens(100, 2)}
    settings = {**configured(tmp_path, **env), "port": 0, "context": 4096, "drain_timeout_s": 0.0}
    async with serving(**settings) as served:
        stream = await (await served.stream(some_tokens(5), 3000)).until(1)
        for chat in chats.values():
            chat += (await served.complete(chat, 8)).tokens
        await served.complete(some_tokens(12, 5), 4)
        following = await served.complete([*chats[kept], *some_tokens(9, 6)], 4)
        lost = next(chat for name, chat in chats.items() if name != kept)
        reads = await served.complete([*lost, *some_tokens(9, 7)], 4)
        stream.leave()
    assert following.cached == len(chats[kept]) - 1
    assert reads.cached == 0, "it was really evicted"
