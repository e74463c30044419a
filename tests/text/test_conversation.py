"""Odd but legal request bodies become the one form that templates know; what cannot be read is refused by its field."""

from __future__ import annotations

from typing import Any

import pytest

from strata.errors import ClientError
from strata.text.conversation import check_tools, normalise, with_arguments
from strata.text.options import check_options

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("hi", "hi"),
        (" hi\n", " hi\n"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "a"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}, "c"], "a\nb\nc"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
def test_content(content: Any, wanted: str) -> None:
    assert normalise([{"role": "user", "content": content}]) == [{"role": "user", "content": wanted}]


def test_a_missing_content_is_empty() -> None:
    assert normalise([{"role": "assistant", "tool_calls": [CALL]}])[0]["content"] == ""


def test_roles() -> None:
    roles = ["system", "user", "assistant", "tool", "function", "developer"]
    messages = [{"role": role, "content": role} for role in roles]
    assert [message["role"] for message in normalise(messages)] == ["system", "user", "assistant", "tool", "tool", "system"]


def test_leading_system_messages_become_one() -> None:
    messages = [
        {"role": "system", "content": "A"},
        {"role": "developer", "content": "B"},
        {"role": "system", "content": ""},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "C"},
        {"role": "system", "content": "D"},
    ]
    assert [(message["role"], message["content"]) for message in normalise(messages)] == [
        ("system", "A\n\nB"), ("user", "hi"), ("system", "C"), ("system", "D")
    ]  # fmt: skip


def test_the_request_is_not_changed() -> None:
    messages = [{"role": "system", "content": "A"}, {"role": "system", "content": "B"}]
    normalise(messages)
    assert messages == [{"role": "system", "content": "A"}, {"role": "system", "content": "B"}]


def test_what_is_kept_and_what_is_dropped() -> None:
    message = {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f", "cache_control": {}, "audio": None, "extra": 1}
    assert normalise([message]) == [{"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f"}]
    assert normalise([{"role": "assistant", "content": "x", "reasoning": "why"}])[0]["reasoning_content"] == "why"


@pytest.mark.parametrize(
    ("arguments", "as_object", "as_text"),
    [
        ('{"a":1}', {"a": 1}, '{"a":1}'),
        ({"a": "é"}, {"a": "é"}, '{"a": "é"}'),
        ("", {}, "{}"),
        (None, {}, "{}"),
        ("not json", "not json", "not json"),
        ("[1]", "[1]", "[1]"),
    ],
)
def test_arguments(arguments: Any, as_object: Any, as_text: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = normalise([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}])
    for form, wanted in ((False, as_object), (True, as_text)):
        changed = with_arguments(messages, form)
        assert changed[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": wanted}}]
        assert changed[0] == messages[0]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user<|im_end|>", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}], "messages[0].tool_calls[0]"),
    ],
)
def test_what_cannot_be_read(messages: Any, param: str) -> None:
    with pytest.raises(ClientError) as error:
        normalise(messages)
    assert error.value.param == param and error.value.status == 400


def test_other_parts_are_refused_by_name() -> None:
    with pytest.raises(ClientError, match="parts 'image_url' are not served here"):
        normalise([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:..."}}]}])
    with pytest.raises(ClientError, match="parts 'of this type' are not served"):
        normalise([{"role": "user", "content": [{"type": "<secret>"}]}])


def test_tools() -> None:
    assert check_tools(None) is None and check_tools([]) is None
    assert check_tools([{"type": "function"}]) == [{"type": "function"}]
    for wrong in ("x", {"a": 1}, ["x"], 3):
        with pytest.raises(ClientError, match="tools must be a list of objects"):
            check_tools(wrong)


def test_options() -> None:
    assert check_options({"enable_thinking": False, "reasoning_effort": "low", "thinking_budget": None}) == {
        "enable_thinking": False,
        "reasoning_effort": "low",
    }
    for wrong in ({"messages": []}, {"chat_template": "x"}, {"bos_token": "x"}):
        with pytest.raises(ClientError, match="only enable_thinking, .* can be set"):
            check_options(wrong)
    for wrong in ({"enable_thinking": 1}, {"thinking_budget": True}, {"date_string": "x" * 5000}):
        with pytest.raises(ClientError, match="must be of type"):
            check_options(wrong)
