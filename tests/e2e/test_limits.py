"""The context's limit, on every route: refused before any byte of a 200, with both numbers; reached while answering, it is ``length``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.serving import CHAT, COMPLETIONS, VOCABULARY, Served, assert_same, cold, completion, is_chat, serving, some_tokens

CONTEXT = 256
ROUTES = ["ids", "text", "chat"]


def prompt_of(route: str, length: int) -> Any:
    """A prompt of exactly so many tokens: one a letter."""
    if route == "ids":
        return some_tokens(length)
    if route == "text":
        return "x" * length
    overhead = len("<") + len("user\n") + len("<") + len("<") + len("assistant\n")  # "<": one control token
    return [{"role": "user", "content": "x" * (length - overhead)}]


async def refusal(served: Served, prompt: Any, **more: Any) -> dict[str, Any]:
    call = await served.call("POST", CHAT if is_chat(prompt) else COMPLETIONS, {**completion(prompt, 0), **more})
    assert call.status == 400 and call.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = (await call.json())["error"]
    return error


def assert_names_both_numbers(error: dict[str, Any], prompt_tokens: int, max_tokens: int) -> None:
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    for number in (prompt_tokens, max_tokens, CONTEXT):
        assert str(number) in error["message"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (prompt_tokens, CONTEXT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_prompts_around_the_limit(tiny_chat: Any, route: str, stream: bool) -> None:
    """H1."""
    async with serving(tiny_chat, context=CONTEXT) as served:
        for length, room in ((CONTEXT - 1, 1), (CONTEXT, 0)):
            # Without max_tokens as much is answered as there is room for.
            result = await (await served.stream(prompt_of(route, length), max_tokens=None)).finish()
            assert result.usage["prompt_tokens"] == length
            assert (len(result.tokens), result.finish) == (room, "length")
        error = await refusal(served, prompt_of(route, CONTEXT + 1), max_tokens=None, stream=stream)
        assert_names_both_numbers(error, CONTEXT + 1, 0)
        assert len((await served.complete(some_tokens(5), 3)).tokens) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_prompt_that_fits_with_an_answer_that_does_not(tiny_chat: Any, route: str, stream: bool) -> None:
    """H2. Nothing is cut to make it fit."""
    async with serving(tiny_chat, context=CONTEXT) as served:
        error = await refusal(served, prompt_of(route, 200), max_tokens=57, stream=stream)
        assert_names_both_numbers(error, 200, 57)
        result = await served.complete(prompt_of(route, 200), 56)
        assert (len(result.tokens), result.finish) == (56, "length")


async def test_the_context_is_full_while_answering(tiny_chat: Any) -> None:
    """H3. Without max_tokens; the tokens up to there are those of a larger context."""
    prompt = prompt_of("chat", 230)
    async with serving(tiny_chat, context=CONTEXT) as served:
        result = await served.complete(prompt, max_tokens=None)
    assert (len(result.tokens), result.finish) == (26, "length")
    assert_same(result, await cold(prompt, 26, {"model": tiny_chat}))


async def test_a_turn_too_long_leaves_the_held_conversation_usable() -> None:
    """H4."""
    conversation = some_tokens(40)
    async with serving(context=CONTEXT, batch=1) as served:
        for turn in range(5):
            result = await served.complete(conversation, 8)
            conversation += [*result.tokens, *some_tokens(20, turn)]
        error = await refusal(served, [*conversation, *some_tokens(100)], max_tokens=8)
        assert_names_both_numbers(error, len(conversation) + 100, 8)
        shorter = await served.complete(conversation, 8)
        assert served.view().slots[0].state == "held"
    assert shorter.cached == len(conversation) - 21
    assert_same(shorter, await cold(conversation, 8))


async def test_an_answer_of_no_tokens_scores_its_prompt() -> None:
    async with serving() as served:
        result = await served.complete(some_tokens(70), 0, echo=True)
    assert result.tokens == [] and result.finish == "length"
    first, *others = result.logprobs
    assert first is None and len(others) == 69 and max(others) < 0


async def test_ids_out_of_the_vocabulary_are_refused_and_the_next_request_served() -> None:
    async with serving() as served:
        for bad in (VOCABULARY, -1, 2**40):
            error = await refusal(served, [5, bad], max_tokens=4)
            assert error["param"] == "prompt" and str(VOCABULARY - 1) in error["message"]
        assert len((await served.complete([5, VOCABULARY - 1], 4)).tokens) == 4
