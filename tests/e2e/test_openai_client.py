"""The official OpenAI client against the whole server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import Served, serving, some_tokens

openai = pytest.importorskip("openai", reason="the official OpenAI client is not installed (pip install openai)")

MESSAGES = [{"role": "system", "content": "Be brief. " * 8}, {"role": "user", "content": "Who are you?"}]
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def client(served: Served, key: str = "none") -> Any:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=60)


async def test_completions(tiny_chat: Path) -> None:
    async with serving(tiny_chat) as served, client(served) as api:
        (model,) = (await api.models.list()).data
        assert model.id == "tiny-chat" == (await api.models.retrieve(model.id)).id
        whole = await api.completions.create(model=model.id, prompt=some_tokens(20), max_tokens=12, logprobs=3, **GREEDY)
        assert whole.usage.completion_tokens == 12 and whole.choices[0].finish_reason == "length"
        assert len(whole.choices[0].logprobs.token_logprobs) == 12
        stream = await api.completions.create(
            model=model.id, prompt=some_tokens(20), max_tokens=12, stream=True, stream_options={"include_usage": True}, **GREEDY,
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
        several = await api.completions.create(model=model.id, prompt=["Hello", "World"], n=2, max_tokens=4, seed=5)
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


async def test_chat(tiny_chat: Path) -> None:
    async with serving(tiny_chat) as served, client(served) as api:
        whole = await api.chat.completions.create(
            model="any", messages=MESSAGES, max_completion_tokens=12, logprobs=True, top_logprobs=2, **GREEDY,
        )
        assert whole.choices[0].message.role == "assistant" and len(whole.choices[0].logprobs.content) == 12
        stream = await api.chat.completions.create(
            model="any", messages=MESSAGES, max_completion_tokens=12, stream=True, stream_options={"include_usage": True}, **GREEDY,
        )
        *chunks, end, usage = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        assert end.choices[0].finish_reason == "length" and usage.usage.completion_tokens == 12
        messages = [*MESSAGES, {"role": "assistant", "content": whole.choices[0].message.content}, {"role": "user", "content": "Why?"}]
        again = await api.chat.completions.create(model="any", messages=messages, max_completion_tokens=4, **GREEDY)
        assert again.usage.prompt_tokens_details.cached_tokens > 0


async def test_a_stream_that_the_client_closes_frees_its_slot(tiny_chat: Path) -> None:
    async with serving(tiny_chat) as served, client(served) as api:
        stream = await api.chat.completions.create(model="any", messages=MESSAGES, stream=True, max_completion_tokens=700, **GREEDY)
        async for _ in stream:
            break
        await stream.close()
        view = await served.until(lambda view: view.running == 0)
        assert view.counters.ended["cancelled"] == 1


async def test_errors(tiny_chat: Path) -> None:
    async with serving(tiny_chat, api_key="right", strict_model=True, context=256) as served:
        async with client(served, "wrong") as api:
            with pytest.raises(openai.AuthenticationError):
                await api.models.list()
        async with client(served, "right") as api:
            with pytest.raises(openai.NotFoundError) as missing:
                await api.chat.completions.create(model="gpt-4o", messages=MESSAGES)
            assert missing.value.code == "model_not_found"
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as too_long:
                    await api.completions.create(model="tiny-chat", prompt="x" * 300, stream=stream)
                assert too_long.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError) as wrong:
                await api.chat.completions.create(model="tiny-chat", messages=MESSAGES, temperature=1000)
            assert wrong.value.param == "temperature"
