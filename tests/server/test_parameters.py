"""Every request field: its range, its type, what it becomes, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, strategies as st

from strata.config.settings import Settings
from strata.errors import ClientError, StrataError
from strata.request import Request, Sampling
from strata.server.admission import Admitted, admit_chat, admit_completion
from strata.server.exchange import Head
from strata.server.fields import Fields, as_integer, parse_object
from strata.server.guard import Guard
from strata.server.service import Model, Service
from tests.server.harness import CONTEXT, TEMPLATE, World, tokenizer

HEAD = Head("POST", "/v1/completions", "", {})


class NoManager:
    """Admission asks nothing of it."""


def service(context: int = CONTEXT) -> Service:
    return Service(Model("tiny", context, 512), NoManager(), tokenizer(), TEMPLATE)  # type: ignore[arg-type]


def admit(body: dict[str, Any] | bytes, settings: Settings = Settings(batch=4), head: Head = HEAD) -> Admitted:
    data = body if isinstance(body, bytes) else json.dumps({"prompt": "x", **body}).encode()
    return admit_completion(data, head, service(), settings, Guard(settings, ()))


def request(body: dict[str, Any], settings: Settings = Settings(batch=4)) -> Request:
    return admit(body, settings).requests[0]


def refused(body: dict[str, Any] | bytes, settings: Settings = Settings(batch=4)) -> StrataError:
    with pytest.raises(StrataError) as caught:
        admit(body, settings)
    return caught.value


@pytest.mark.parametrize("name, value, hint", [
    ("temperature", 1000000, "0 to 100"), ("temperature", -0.1, "0 to 100"), ("temperature", True, "number"),
    ("temperature", "1", "number"),
    ("top_p", -1, "0 to 1"), ("top_p", 1.01, "0 to 1"), ("min_p", 2, "0 to 1"), ("top_k", -2, "at least -1"), ("top_k", 1.5, "integer"),
    ("repeat_penalty", 0, "greater than 0"), ("repetition_penalty", -1, "greater than 0"), ("presence_penalty", 2.1, "-2 to 2"),
    ("frequency_penalty", -3, "-2 to 2"), ("seed", -2, "at least -1"), ("seed", 2**63, "integer"), ("seed", 2**70, "integer"),
    ("n", 0, "1 to 64"), ("n", 100000, "1 to 64"), ("n", True, "integer"), ("max_tokens", -2, "at least -1"),
    ("max_tokens", "5", "integer"),
    ("logprobs", 21, "0 to 20"), ("logprobs", -1, "0 to 20"), ("logprobs", True, "integer"), ("id_slot", 4, "-1 to 3"),
    ("stop", "", "1 to 1024"), ("stop", ["a"] * 17, "at most 16"), ("stop", [1], "strings"), ("stop", {"a": 1}, "list"),
    ("stop", ["x" * 1025], "1 to 1024"), ("stop_token_ids", [512], "below 512"), ("stop_token_ids", [1.5], "token ids"),
    ("logit_bias", {"512": 1}, "below 512"), ("logit_bias", {"x": 1}, "pairs"), ("logit_bias", {"1": 101}, "-100 to 100"),
    ("logit_bias", [[1]], "pairs"), ("logit_bias", [[1, True]], "pairs"), ("logit_bias", 5, "list"),
    ("logit_bias", {"-1": 1}, "pairs"), ("logit_bias", {"²": 1}, "pairs"), ("stream", "yes", "true or false"),
    ("stream", 1, "true or false"),
    ("stream_options", [], "object"), ("cache_prompt", "no", "true or false"), ("model", 5, "string"), ("best_of", 3, "n"),
    ("suffix", "end", "not supported"), ("min_tokens", 4, "not supported"), ("grammar", "root ::= root", "not supported"),
    ("json_schema", {"type": "object"}, "not supported"), ("n_discard", -1, "not supported"),
    ("truncate_prompt_tokens", 5, "not supported"),
    ("chat_template", "{{ x }}", "not supported"), ("response_format", {"type": "json_object"}, "text"), ("echo", 1, "true or false"),
    ("cache_salt", 5, "string"), ("response_format", "json", "object"),
])
def test_out_of_range_says_the_range_and_the_field(name: str, value: object, hint: str) -> None:
    error = refused({name: value})
    assert error.status == 400 and hint in error.message
    assert error.param == name and name in error.message


@pytest.mark.parametrize("prompt", [
    5, None, {}, ["a", 1], [[1], "a"], [1, True], [1, 1.5], [512], [-1], [[512]], [None], [[["a"]]], [2**70],
])
def test_wrong_prompts(prompt: object) -> None:
    error = refused({"prompt": prompt})
    assert error.status == 400 and error.param == "prompt"


@pytest.mark.parametrize("body", [
    b"", b"[]", b"5", b"{", b'{"prompt": "\xff"}', '{"prompt":"早安"}'.encode("gbk"), b'{"prompt": "\\ud83d"}', b'{"temperature": NaN}',
    b'{"temperature": 1e999}', b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
], ids=["empty", "list", "number", "cut", "byte FF", "GBK", "lone surrogate", "NaN", "infinite", "deep"])
def test_bodies_that_are_not_json(body: bytes) -> None:
    assert refused(body).status == 400


def test_grammar_nested_deep_is_refused_and_harmless() -> None:
    assert refused({"grammar": "(" * 60_000 + ")" * 60_000}).status == 400
    assert refused({"response_format": {"type": "json_schema", "json_schema": {"pattern": "(" * 50_000}}}).param == "response_format"


def test_numbers_as_floats_byte_order_mark_nulls_and_unknown_keys() -> None:
    made = request({"max_tokens": 100.0, "top_k": 5.0, "seed": 7.0})
    assert (made.max_tokens, made.sampling.top_k, made.sampling.seed) == (100, 5, 7)
    assert admit(b'\xef\xbb\xbf{"prompt":"x"}').requests
    nulls = dict.fromkeys(("max_tokens", "temperature", "stop", "n", "logit_bias", "suffix", "best_of", "stream", "logprobs", "user"))
    assert request(nulls).sampling.temperature == 1.0
    assert request({"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "verbosity": 3, "made_up": [1]})


def test_sampling_fields_arrive() -> None:
    made = request({
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repeat_penalty": 1.5, "logit_bias": {"9": 3, "4": -100}, "seed": 2**63 - 1, "logprobs": 3,
    })
    assert made.sampling == Sampling(0.5, 7, 0.9, 0.1, 1.0, -1.0, 1.5, ((4, -100.0), (9, 3.0)), 2**63 - 1, 0, 3)
    assert request({"logit_bias": [[9, 3]]}).sampling.logit_bias == ((9, 3.0),)
    assert request({"repetition_penalty": 1.2, "repeat_penalty": 1.5}).sampling.repetition_penalty == 1.2


def test_defaults_come_from_the_settings() -> None:
    settings = Settings(batch=4, temperature=0.3, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.1)
    made = request({}, settings).sampling
    assert (made.temperature, made.top_k, made.top_p, made.min_p, made.repetition_penalty) == (0.3, 20, 0.8, 0.05, 1.1)
    assert request({"temperature": 0, "top_k": 0}, settings).sampling.temperature == 0
    assert request({"temperature": 0, "top_k": 0}, settings).sampling.top_k == 0


@pytest.mark.parametrize("given_k, expected", [(-1, 0), (0, 0), (517, 512), (2**62, 512)])
def test_top_k_off_and_clamped(given_k: int, expected: int) -> None:
    assert request({"top_k": given_k}).sampling.top_k == expected


def test_a_tiny_temperature_is_greedy() -> None:
    assert request({"temperature": 1e-300}).sampling.temperature == 0.0


def test_no_seed_is_a_fresh_one_each_time_and_is_reported() -> None:
    seeds = {admit(body).seed for body in [{}, {}, {"seed": -1}, {"seed": None}, {}]}
    assert len(seeds) == 5 and all(0 <= seed < 2**53 for seed in seeds), "JavaScript can send them back"


def test_choices_count_up_with_one_seed() -> None:
    made = admit({"prompt": ["x", "yz"], "n": 3, "seed": 4})
    assert [(each.sampling.choice, each.sampling.seed, len(each.prompt)) for each in made.requests] == [
        (0, 4, 1), (1, 4, 1), (2, 4, 1), (0, 4, 2), (1, 4, 2), (2, 4, 2),
    ]
    assert len({each.id for each in made.requests}) == 6
    assert refused({"prompt": ["x"] * 5, "n": 64}).param == "n"


def test_more_choices_than_slots_and_queue_hold_are_refused_for_good() -> None:
    """A 503 would send the client into retries that cannot succeed."""
    settings = Settings(batch=2, queue_size=2)
    assert len(admit({"n": 4}, settings).requests) == 4
    error = refused({"n": 5}, settings)
    assert (error.status, error.param) == (400, "n") and "at most 4" in error.message


def test_max_tokens_names_and_defaults() -> None:
    assert request({"max_tokens": 5, "max_completion_tokens": 7}).max_tokens == 7
    assert request({"n_predict": 9}).max_tokens == 9
    assert request({}).max_tokens == 16
    assert request({"max_tokens": -1}).max_tokens == 16
    assert request({"max_tokens": 0}).max_tokens == 0


@pytest.mark.parametrize("length, status", [(CONTEXT - 1, 200), (CONTEXT, 200), (CONTEXT + 1, 400)])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_prompts_around_the_context(length: int, status: int, stream: bool, path: str) -> None:
    overhead = len("user: \n") if "chat" in path else 0
    text = "x" * (length - overhead)
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    world = World()
    answer = await world.post(path, {**body, "stream": stream, "ignore_eos": True})
    assert answer.status == status
    if status == 400:
        assert answer.error["code"] == "context_length_exceeded" and answer.error["type"] == "invalid_request_error"
        assert answer.error["n_prompt_tokens"] == length and answer.error["n_ctx"] == CONTEXT
        assert "maximum context length is 256 tokens" in answer.error["message"]
    else:
        finish = answer.events[-1]["choices"][0]["finish_reason"] if stream else answer.json["choices"][0]["finish_reason"]
        assert finish == "length"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_prompt_far_beyond_the_context_is_refused_before_it_is_tokenised(path: str) -> None:
    text = "word " * 200_000
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    answer = await World().post(path, body)
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
    assert "at least" in answer.error["message"] and CONTEXT < answer.error["n_prompt_tokens"] < len(text)


@pytest.mark.parametrize("max_tokens", [CONTEXT, 100_000_000, 2**63 - 1])
async def test_prompt_and_answer_over_the_context_are_never_cut(max_tokens: int) -> None:
    world = World()
    answer = await world.post("/v1/completions", {"prompt": "x", "max_tokens": max_tokens, "stream": True})
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded" and str(max_tokens) in answer.error["message"]
    assert not world.engine.seen


def test_placement() -> None:
    placement = request({"id_slot": 2, "prompt_cache_key": "chat-1", "cache_prompt": False, "strata_checkpoint": False}).placement
    assert (placement.slot, placement.key, placement.reuse, placement.keep) == (2, "chat-1", False, False)
    assert request({"id_slot": -1}).placement.slot is None
    by_header = admit({}, head=Head("POST", "/", "", {"x-session-id": "s-1"})).requests[0].placement
    assert by_header.key == "s-1"
    assert request({"session_id": "s-2", "prompt_cache_key": "p"}).placement.key == "s-2"
    assert refused({"session_id": "s", "id_slot": 1}).param == "id_slot"


def test_strict_model_names() -> None:
    settings = Settings(batch=4, strict_model=True)
    with pytest.raises(StrataError) as caught:
        admit({"model": "gpt-4o"}, settings)
    assert caught.value.status == 404 and caught.value.code == "model_not_found"
    assert admit({"model": "tiny"}, settings) and admit({}, settings) and admit({"model": "gpt-4o"})


def test_chat_logprobs() -> None:
    def made(**more: object) -> Sampling:
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], **more}).encode()
        settings = Settings(batch=4)
        return admit_chat(body, HEAD, service(), settings, Guard(settings, ())).requests[0].sampling

    assert [made().logprobs, made(logprobs=True).logprobs, made(logprobs=True, top_logprobs=5).logprobs] == [-1, 0, 5]
    assert made(logprobs=False).logprobs == -1
    for wrong in ({"top_logprobs": 5}, {"logprobs": 5}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(ClientError):
            made(**wrong)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4), max_leaves=6,
)
NAMES = (
    "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "presence_penalty", "repeat_penalty", "logit_bias", "logprobs", "n", "response_format", "echo", "suffix", "best_of", "ignore_eos",
    "stop_token_ids", "id_slot", "cache_prompt", "session_id", "cache_salt", "return_token_ids", "grammar", "min_tokens", "model",
)


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6))
def test_any_values_are_admitted_or_refused(body: dict[str, object]) -> None:
    settings = Settings(batch=4)
    try:
        admitted = admit_completion(json.dumps(body).encode(), HEAD, service(), settings, Guard(settings, ()))
    except StrataError as error:
        assert 400 <= error.status < 500
        orjson.dumps(error.message)
        return
    for made in admitted.requests:
        assert made.prompt and 0 <= made.max_tokens <= CONTEXT - len(made.prompt)
        assert 0 <= made.sampling.seed < 2**63


@given(st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=3))
def test_integers_are_whole_and_of_64_bits(value: object) -> None:
    number = as_integer(value)
    if number is None:
        is_whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value and abs(value) < 2**63
        assert not (is_whole and value == int(value))  # type: ignore[call-overload]
    else:
        assert type(number) is int and number == value


def test_nested_names_are_told_in_full() -> None:
    with pytest.raises(ClientError, match=r"stream_options\.include_usage must be true or false"):
        parse_object(b'{"stream_options": {"include_usage": 1}}').nested("stream_options").flag("include_usage", False)
    assert Fields({}).nested("anything").flag("x", True)
