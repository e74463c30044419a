"""The whole server with a trained model: reference answers, eight requests at once, and health while a long prompt is read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any


from tests.e2e.client import Result
from tests.e2e.serving import COMPLETIONS, DATA, Served, assert_same, serving

CASES = json.loads((DATA / "smollm2-greedy.json").read_text())
QUESTIONS = [
    "What is the capital of Italy?", "Write one line about the sea.", "Name three rivers of Europe, please, and where they end.",
    "hi", "Translate to French: good morning, my friend.", "What is 7 times 6?", "Who wrote Hamlet, and when?", "Why is the sky blue?",
]


END = 2


def chat(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


async def check_case(served: Served, case: dict[str, Any], prompt: Any) -> None:
    oracle = Result(tokens=case["greedy_ids"], gaps=case["greedy_gap"])
    result = await served.complete(prompt, len(oracle.tokens), ignore_eos=False)
    assert result.usage["prompt_tokens"] == len(case["prompt_ids"])
    assert_same(result, oracle)
    if result.tokens == oracle.tokens:
        assert result.text == case["greedy_text"].removesuffix("<|im_end|>")
        assert result.finish == ("stop" if result.tokens[-1] == END else "length")


async def test_the_reference_answers(smollm2: Path) -> None:
    """As token ids, as text, and through the chat template; all at once, which changes nothing."""
    checks = []
    async with serving(smollm2) as served:
        for case in CASES:
            ways = [case["prompt_ids"], chat(case["user"]) if case["kind"] == "chat" else case["text"]]
            checks += [check_case(served, case, prompt) for prompt in ways]
        await asyncio.gather(*checks)


async def test_alone_or_with_seven_others(smollm2: Path) -> None:
    samplings: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 11}] * 4
    async with serving(smollm2) as served:
        streams = []
        for place, (question, sampling) in enumerate(zip(QUESTIONS, samplings)):
            streams.append(await served.stream(chat(question), 14 - place, **sampling))
            await streams[-1].until(1)
        together = [await stream.finish() for stream in streams]
        assert served.view().counters.decode_rows > served.view().counters.decode_windows
        for place in (0, 1, 4, 7):
            alone = await served.complete(chat(QUESTIONS[place]), 14 - place, cache_prompt=False, **samplings[place])
            assert together[place].bits == alone.bits


async def test_the_next_turn_reads_only_what_is_new(smollm2: Path) -> None:
    messages = chat("Tell me about the Alps. " * 20)
    async with serving(smollm2) as served:
        first = await served.complete(messages, 12, ignore_eos=False)
        messages += [{"role": "assistant", "content": first.text}, *chat("And the Andes?")]
        second = await served.complete(messages, 8)
        cold = await served.complete(messages, 8, cache_prompt=False)
    assert second.cached >= first.usage["prompt_tokens"] > 100
    assert second.timings["prompt_n"] == second.usage["prompt_tokens"] - second.cached < 60
    assert cold.cached == 0
    assert_same(second, cold)


async def test_health_answers_within_a_tenth_of_a_second_while_a_long_prompt_is_read(smollm2: Path) -> None:
    """The median over the whole of the reading: one busy moment of the machine is no fault of the server."""
    loop = asyncio.get_running_loop()
    async with serving(smollm2, context=2048) as served:
        body = {"prompt": [504, 3575] * 400, "max_tokens": 1}
        reading = asyncio.ensure_future(served.call("POST", COMPLETIONS, body))
        await served.until(lambda view: any(slot.state == "reading" for slot in view.slots))
        times = []
        while not reading.done():
            begin = loop.time()
            await served.get("/health")
            times.append(loop.time() - begin)
        assert (await reading).status == 200
    assert len(times) > 10 and sorted(times)[len(times) // 2] < 0.1
