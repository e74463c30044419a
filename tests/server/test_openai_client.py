"""The official OpenAI client against a live port, with a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from strata.config.settings import Settings
from tests.server.harness import CONTEXT, END, ScriptedEngine, World, says, tokens
from tests.server.sockets import HOST, serving


def in_thread(function: Any) -> Any:
    return asyncio.get_running_loop().run_in_executor(None, function)


def openai_client(port: int, **more: Any) -> Any:
    openai = pytest.importorskip("openai", reason="the official OpenAI client is not installed (pip install openai)")
    return openai.OpenAI(base_url=f"http://{HOST}:{port}/v1", api_key=more.pop("api_key", "unused"), max_retries=0, timeout=30, **more)


async def test_openai_client_completions_and_chat() -> None:
    async with serving(World()) as listener:
        client = openai_client(listener.address[1])
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]

        def use() -> None:
            with client:
                assert [model.id for model in client.models.list()] == ["tiny"]
                assert client.models.retrieve("tiny").owned_by == "strata"
                whole = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=5, seed=1, logprobs=2)
                assert [choice.text for choice in whole.choices] == ["hello", "hello"]
                assert whole.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4]
                pieces = client.completions.create(model="tiny", prompt="a", max_tokens=50, stream=True)
                assert "".join(piece.choices[0].text for piece in pieces) == "hello world"
                chat = client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=2)
                assert chat.choices[0].message.content == "hello world" and chat.choices[0].finish_reason == "stop"
                assert chat.usage.prompt_tokens_details.cached_tokens >= 0
                assert len(chat.choices[0].logprobs.content) == 12
                with client.chat.completions.stream(
                    model="tiny", messages=messages, n=2, stream_options={"include_usage": True}
                ) as stream:
                    final = stream.until_done().get_final_completion()
                assert [choice.message.content for choice in final.choices] == ["hello world"] * 2
                assert final.usage.completion_tokens == 24

        await in_thread(use)


async def test_openai_client_errors() -> None:
    openai = pytest.importorskip("openai", reason="the official OpenAI client is not installed (pip install openai)")
    world = World(settings=Settings(batch=4, api_key="right", strict_model=True))
    async with serving(world) as listener:
        right, wrong = openai_client(listener.address[1], api_key="right"), openai_client(listener.address[1], api_key="wrong")

        def use() -> None:
            with right, wrong:
                with pytest.raises(openai.AuthenticationError):
                    wrong.models.list()
                with pytest.raises(openai.NotFoundError) as missing:
                    right.completions.create(model="gpt-4o", prompt="x")
                assert missing.value.code == "model_not_found"
                with pytest.raises(openai.BadRequestError) as over:
                    right.completions.create(model="tiny", prompt="x", max_tokens=1000, stream=True)
                assert over.value.code == "context_length_exceeded"
                with pytest.raises(openai.BadRequestError) as bad:
                    right.completions.create(model="tiny", prompt="x", temperature=1e6)
                assert bad.value.param == "temperature"

        await in_thread(use)


async def test_openai_client_sees_a_failure_in_the_stream() -> None:
    openai = pytest.importorskip("openai", reason="the official OpenAI client is not installed (pip install openai)")
    world = World(engine=ScriptedEngine(says(tokens("hello"), END), CONTEXT, is_manual=True))
    async with serving(world) as listener:
        client = openai_client(listener.address[1])

        def use() -> None:
            with client, pytest.raises(openai.APIError):
                for _ in client.completions.create(model="tiny", prompt="x", stream=True):
                    pass

        done = in_thread(use)
        for n in range(3):
            while not world.engine.windows:
                await asyncio.sleep(0.001)
            if n < 2:
                world.engine.step()
        world.engine.fail("stage 0: lost")
        await done
