"""The kernels behind HTTP: the server on the emulated device, started as a user starts it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from strata.devices.host_compiler import find_compiler
from tests.e2e.process import launched
from tests.e2e.serving import cold, some_tokens
from tests.engine.drafting import exact, rewritten

pytestmark = [
    pytest.mark.cxx,
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (g++ or clang++) found"),
]
SIZES = ("--device", "emulated", "--context", "256", "--batch", "2", "--chunk", "32")
GAP = 0.3  # nats that int8 activations can make up for with these weights (tests/kernels/test_engine.py: 0.05 rms on logits)


@pytest.mark.parametrize("kv", ["int8", "f16"])
async def test_the_kernels_serve_what_the_processors_serve(kv: str) -> None:
    """One request alone, then beside a seeded one: the same tokens, and those of the CPU engine up to the first close call."""
    prompt = some_tokens(40)
    oracle = await cold(prompt, 6)
    async with launched(*SIZES, "--kv", kv) as process:
        await process.until_ready()
        assert any("emulated" in line and "weights" in line for line in process.log), process.log  # the plan, before the weights
        alone = await process.complete(prompt, 6, cache_prompt=False)
        beside, seeded = await asyncio.gather(
            process.complete(prompt, 6, cache_prompt=False), process.complete(some_tokens(9, 1), 6, temperature=0.9, seed=5)
        )
        again = await process.complete(some_tokens(9, 1), 6, temperature=0.9, seed=5)
    assert alone.tokens == beside.tokens and seeded.tokens == again.tokens
    for token, expected, gap in zip(alone.tokens, oracle.tokens, oracle.gaps, strict=True):
        if gap < GAP:
            break
        assert token == expected


async def test_two_stages_on_one_device_change_no_token() -> None:
    prompt = some_tokens(20, 2)
    answers = []
    for split in ((), ("--devices", "0,0", "--layer-split", "1")):
        async with launched(*SIZES, *split) as process:
            await process.until_ready()
            answers.append((await process.complete(prompt, 4)).tokens)
    assert answers[0] == answers[1]


async def test_a_head_drafts_on_the_device_and_changes_no_token(tmp_path: Path) -> None:
    """Experts, and a head that is always right: with drafts a greedy answer takes fewer windows, a drawn one beside it is the same."""
    model = rewritten("glm4moe-accept-all-iq3s", tmp_path / "model.gguf", exact)
    prompt, drawn, answers = some_tokens(20, 2), {"temperature": 0.8, "seed": 6}, []
    for spec in (1, 4):
        async with launched(*SIZES, "--spec", str(spec), model=model) as process:
            await process.until_ready()
            both = await asyncio.gather(process.complete(prompt, 9), process.complete(some_tokens(7, 3), 6, **drawn))
            answers.append([result.tokens for result in both])
            timings = both[0].timings
    assert answers[0] == answers[1]
    assert timings["draft_n"] == timings["draft_n_accepted"] >= 4
