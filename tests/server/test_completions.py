"""/v1/completions: shapes, prompts, echo, stops, choices."""

from __future__ import annotations

import math

import pytest

from tests.server.harness import CONTEXT, END, ScriptedEngine, World, says, tokens

PATH = "/v1/completions"


async def test_whole_answer() -> None:
    world = World()
    answer = await world.post(PATH, {"model": "any", "prompt": "hi", "max_tokens": 64, "seed": 7})
    assert answer.status == 200
    body = answer.json
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-") and body["model"] == "tiny"
    assert body["choices"] == [
        {"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == len(tokens("hello world")) + 1
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert body["seed"] == 7
    assert body["timings"]["prompt_n"] == 2 and body["timings"]["predicted_n"] == 12


async def test_default_is_sixteen_tokens() -> None:
    world = World(engine=ScriptedEngine(says([], 5), CONTEXT))
    body = (await world.post(PATH, {"prompt": "hi"})).json
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt, lengths", [
    ("hi", [2]), (["hi", "there"], [2, 5]), ([3, 4, 5], [3]), ([[3], [4, 5]], [1, 2]),
])
async def test_prompt_forms(prompt: object, lengths: list[int]) -> None:
    body = (await World().post(PATH, {"prompt": prompt, "max_tokens": 4})).json
    assert [choice["index"] for choice in body["choices"]] == list(range(len(lengths)))
    assert body["usage"]["prompt_tokens"] == sum(lengths)


async def test_streamed_answer_equals_the_whole_one() -> None:
    world = World()
    body = {"prompt": ["hi", "there"], "n": 2, "max_tokens": 8, "seed": 1}
    whole = (await world.post(PATH, body)).json
    answer = await world.post(PATH, {**body, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-accel-buffering"] == "no" and answer.headers["cache-control"] == "no-cache"
    texts = [""] * 4
    finishes: list[list[str]] = [[] for _ in range(4)]
    for chunk in answer.events:
        assert chunk["object"] == "text_completion" and "usage" not in chunk
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"] is not None:
            finishes[choice["index"]].append(choice["finish_reason"])
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert finishes == [["length"]] * 4
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in answer.events}) == 1
    assert answer.events[-1]["seed"] == 1 and answer.events[-1]["timings"]["predicted_n"] == 32


@pytest.mark.parametrize("wanted", [True, False, None])
async def test_usage_chunk_exactly_as_asked(wanted: bool | None) -> None:
    body: dict[str, object] = {"prompt": "hi", "stream": True, "max_tokens": 3}
    if wanted is not None:
        body["stream_options"] = {"include_usage": wanted}
    events = (await World().post(PATH, body)).events
    if wanted:
        assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 3
        assert all(chunk["usage"] is None for chunk in events[:-1])
        assert "timings" in events[-1] and not any("timings" in chunk for chunk in events[:-1])
    else:
        assert not any("usage" in chunk for chunk in events)
        assert "timings" in events[-1]


async def test_stop_string_over_two_tokens() -> None:
    world = World(engine=ScriptedEngine(says(tokens("the amber kite flew"), END), CONTEXT))
    body = (await world.post(PATH, {"prompt": "x", "stop": ["amber kite"], "max_tokens": 50})).json
    [choice] = body["choices"]
    assert choice["text"] == "the " and choice["finish_reason"] == "stop" and choice["stop_reason"] == "amber kite"
    assert body["usage"]["completion_tokens"] == len(tokens("the amber kite"))


async def test_what_was_held_back_comes_at_the_end() -> None:
    world = World(engine=ScriptedEngine(says(tokens("red ki"), END), CONTEXT))
    events = (await world.post(PATH, {"prompt": "x", "stop": ["kite!"], "stream": True, "max_tokens": 50})).events
    assert "".join(chunk["choices"][0]["text"] for chunk in events) == "red ki"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_stop_string_kept_when_asked() -> None:
    world = World(engine=ScriptedEngine(says(tokens("the end."), END), CONTEXT))
    body = {"prompt": "x", "stop": "end", "include_stop_str_in_output": True, "max_tokens": 50}
    assert (await world.post(PATH, body)).json["choices"][0]["text"] == "the end"


async def test_characters_split_over_tokens_arrive_whole() -> None:
    world = World(engine=ScriptedEngine(says(tokens("🦊海"), END), CONTEXT))
    events = (await world.post(PATH, {"prompt": "x", "stream": True, "max_tokens": 50})).events
    assert [chunk["choices"][0]["text"] for chunk in events] == ["🦊", "海", ""]


async def test_stop_token_ids_end_without_text() -> None:
    world = World(engine=ScriptedEngine(says(tokens("abc!rest"), END), CONTEXT))
    [stop] = tokens("!")
    [choice] = (await world.post(PATH, {"prompt": "x", "stop_token_ids": [stop], "max_tokens": 50})).json["choices"]
    assert choice["text"] == "abc" and choice["finish_reason"] == "stop" and choice["stop_reason"] == stop


async def test_ignore_eos_goes_on() -> None:
    body = (await World().post(PATH, {"prompt": "x", "ignore_eos": True, "max_tokens": 20})).json
    assert body["choices"][0]["text"] == "hello world" and body["usage"]["completion_tokens"] == 20
    assert body["choices"][0]["finish_reason"] == "length"


async def test_echo_and_logprobs_score_a_prompt_without_generating() -> None:
    body = (await World().post(PATH, {"prompt": "one two", "echo": True, "max_tokens": 0, "logprobs": 1})).json
    [choice] = body["choices"]
    assert choice["text"] == "one two" and choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("one two")
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value == pytest.approx(math.log(0.5)) for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == list(range(7))
    assert body["usage"]["completion_tokens"] == 0


async def test_offsets_count_only_the_text_that_is_shown() -> None:
    body = {"prompt": [1, *tokens("ab é")], "echo": True, "max_tokens": 20, "logprobs": 0, "skip_special_tokens": True}
    [choice] = (await World().post(PATH, body)).json["choices"]
    assert choice["text"] == "<s>ab éhello world"
    logprobs = choice["logprobs"]
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"]):
        assert name.startswith("bytes:") or name == "</s>" or choice["text"][offset:].startswith(name)
    assert logprobs["text_offset"][-1] == len(choice["text"])


async def test_echo_in_front_of_a_stream() -> None:
    events = (await World().post(PATH, {"prompt": "one ", "echo": True, "stream": True, "max_tokens": 5})).events
    assert events[0]["choices"][0]["text"] == "one "
    assert "".join(chunk["choices"][0]["text"] for chunk in events) == "one hello"


async def test_completion_logprobs_have_their_own_shape() -> None:
    body = (await World().post(PATH, {"prompt": "x", "logprobs": 5, "max_tokens": 5})).json
    logprobs = body["choices"][0]["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["tokens"] == list("hello") and logprobs["text_offset"] == [0, 1, 2, 3, 4]
    for top in logprobs["top_logprobs"]:
        assert len(top) == 5 and all(value <= 0 for value in top.values())
        assert sum(math.exp(value) for value in top.values()) <= 1
    assert logprobs["top_logprobs"][2] != logprobs["top_logprobs"][3], "each position has its own list"


async def test_token_ids_come_back_when_asked() -> None:
    body = {"prompt": [5, 6], "return_token_ids": True, "max_tokens": 20}
    [choice] = (await World().post(PATH, body)).json["choices"]
    assert choice["prompt_token_ids"] == [5, 6] and choice["token_ids"] == [*tokens("hello world"), END]
    events = (await World().post(PATH, {**body, "stream": True})).events
    assert sum((chunk["choices"][0].get("token_ids", []) for chunk in events), []) == choice["token_ids"]


async def test_second_turn_reports_what_was_cached() -> None:
    world = World()
    first = (await world.post(PATH, {"prompt": "x" * 100, "max_tokens": 5})).json
    second = (await world.post(PATH, {"prompt": "x" * 100 + "hello and more", "max_tokens": 5})).json
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 100
    assert second["timings"]["cache_n"] == cached and second["timings"]["cache_n"] + second["timings"]["prompt_n"] == 114


@pytest.mark.parametrize("prompt", ["", [""], []])
async def test_an_empty_prompt_is_refused_and_harms_nobody(prompt: object) -> None:
    world = World()
    assert (await world.post(PATH, {"prompt": prompt})).status == 400
    assert (await world.post(PATH, {"prompt": "hi"})).status == 200
