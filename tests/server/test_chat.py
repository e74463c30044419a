"""/v1/chat/completions: shapes, roles and contents, tools, logprobs."""

from __future__ import annotations

import dataclasses
import math

import pytest

from strata.text.template import ChatTemplate
from tests.server.harness import CONTEXT, END, ScriptedEngine, World, says, tokens

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


async def test_whole_answer() -> None:
    body = (await World().post(PATH, {"messages": [USER]})).json
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["choices"] == [{
        "index": 0, "message": {"role": "assistant", "content": "hello world", "refusal": None}, "logprobs": None,
        "finish_reason": "stop", "stop_reason": None,
    }]
    assert body["usage"]["prompt_tokens"] == len(tokens("user: hi\n"))


async def test_streamed_answer() -> None:
    events = (await World().post(PATH, {"messages": [USER], "n": 2, "stream": True, "seed": 3})).events
    by_choice = {index: [event["choices"][0] for event in events if event["choices"][0]["index"] == index] for index in (0, 1)}
    for choices in by_choice.values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in choice["delta"] for choice in choices[1:])
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "hello world"
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert choices[-1]["delta"] == {}
    assert events[-1]["seed"] == 3 and events[-1]["timings"]["predicted_n"] == 24
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


async def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    world = World(engine=ScriptedEngine(says([], 5), CONTEXT))
    body = (await world.post(PATH, {"messages": [USER]})).json
    assert body["usage"]["total_tokens"] == CONTEXT and body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_are_a_list_of_objects(stream: bool) -> None:
    world = World(engine=ScriptedEngine(says(tokens("aé"), END), CONTEXT))
    answer = await world.post(PATH, {"messages": [USER], "logprobs": True, "top_logprobs": 5, "stream": stream})
    if stream:
        content = sum((event["choices"][0]["logprobs"] or {"content": []} for event in answer.events), start=_Joined()).entries
    else:
        content = answer.json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "bytes:\\xc3", "bytes:\\xa9", "</s>"]
    assert bytes(sum((entry["bytes"] for entry in content[:3]), [])).decode() == "aé"
    for entry in content:
        assert len(entry["top_logprobs"]) == 5
        assert all(top["logprob"] <= 0 for top in entry["top_logprobs"])
        assert sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) <= 1
    assert content[0]["top_logprobs"] != content[1]["top_logprobs"]


class _Joined:
    """Adds up the logprobs of chunks."""

    def __init__(self) -> None:
        self.entries: list[dict[str, object]] = []

    def __add__(self, chunk: dict[str, list[dict[str, object]]]) -> _Joined:
        self.entries += chunk["content"]
        return self


@pytest.mark.parametrize("content, text", [
    ("plain", "plain"), ("", ""), (None, ""), ([], ""), ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "a"),
])
async def test_contents_that_clients_send(content: object, text: str) -> None:
    messages = [USER, {"role": "assistant", "content": content, "name": "x"}, USER]
    assert (await World().post("/apply-template", {"messages": messages})).json == {"prompt": f"user: hi\nassistant: {text}\nuser: hi\n"}
    assert (await World().post(PATH, {"messages": messages})).status == 200


async def test_an_assistant_message_without_content() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "2"}]
    assert (await World().post(PATH, {"messages": messages})).status == 200


@pytest.mark.parametrize("messages, where", [
    (None, "messages"), ([], "messages"), ("hi", "messages"), ([5], "messages[0]"), ([{"content": "x"}], "messages[0].role"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"), ([USER, {"role": "user", "content": 5}], "messages[1].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
    ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
])
async def test_messages_of_a_wrong_shape(messages: object, where: str) -> None:
    answer = await World().post(PATH, {"messages": messages})
    assert answer.status == 400 and where in answer.error["message"] and answer.error["param"] == where


async def test_tools_reach_the_template() -> None:
    async def prompt(**more: object) -> str:
        return str((await World().post("/apply-template", {"messages": [USER], **more})).json["prompt"])

    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert (await prompt(tools=[tool], tool_choice="auto", parallel_tool_calls=True)).startswith("tool f\n")
    assert await prompt(tools=[tool], tool_choice="none") == await prompt(tools=[]) == "user: hi\n"
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        answer = await World().post(PATH, {"messages": [USER], "tools": [tool], "tool_choice": choice})
        assert answer.status == 400 and answer.error["param"] == "tool_choice"
    assert (await World().post(PATH, {"messages": [USER], "tools": ["f"]})).status == 400


async def test_only_known_switches_reach_the_template() -> None:
    world = World()
    by_field = await world.post("/apply-template", {"messages": [USER], "reasoning_effort": "low"})
    by_switch = await world.post("/apply-template", {"messages": [USER], "chat_template_kwargs": {"reasoning_effort": "low"}})
    assert by_field.json == by_switch.json == {"prompt": "effort low\nuser: hi\n"}
    for wrong in ({"enable_thinking": "no"}, {"bos_token": "evil"}):
        assert (await world.post(PATH, {"messages": [USER], "chat_template_kwargs": wrong})).status == 400


async def test_an_assistant_message_at_the_end_is_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "hello w"}]
    body = (await World().post("/apply-template", {"messages": messages})).json
    assert body == {"prompt": "user: hi\nhello w"}
    closed = (await World().post("/apply-template", {"messages": messages, "continue_final_message": False})).json
    assert closed == {"prompt": "user: hi\nassistant: hello w\n"}


async def test_the_next_turn_continues_the_held_conversation() -> None:
    world = World()
    user = {"role": "user", "content": "x" * 60}
    first = (await world.post(PATH, {"messages": [user], "max_tokens": 4})).json
    said = first["choices"][0]["message"]
    second = (await world.post(PATH, {"messages": [user, said, {"role": "user", "content": "more"}], "max_tokens": 4})).json
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 64, "the pages of 16 tokens that both share"
    assert world.manager.view().counters.reuse["continued"] == 1


async def test_turn_marks_and_max_completion_tokens() -> None:
    world = World()
    body = (await world.post(PATH, {"messages": [USER], "max_tokens": 5, "max_completion_tokens": 7})).json
    assert body["usage"]["completion_tokens"] == 7 and body["choices"][0]["finish_reason"] == "length"


async def test_a_model_without_template_says_so() -> None:
    world = World()
    service = world.site.loaded()
    for template in (None, ChatTemplate({})):
        world.site.service = dataclasses.replace(service, template=template)
        answer = await world.post(PATH, {"messages": [USER]})
        assert answer.status == 400 and answer.error["code"] == "no_chat_template"
