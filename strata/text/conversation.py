"""Brings the messages of a chat request into the one form that chat templates are written for.

Clients send many legal shapes: content as a string, as parts, null or missing; arguments as JSON text or as an object;
``developer`` for ``system``. Templates know one: content a string, arguments an object, roles system, user, assistant, tool.
Several system messages at the start become one, for many templates take only the first message as such.

Text is kept as it is: nothing is trimmed. What cannot be read (images, audio, unknown roles) is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from strata.errors import ClientError

Message = dict[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalise(messages: object) -> list[Message]:
    """The messages as templates expect them. Raises ``ClientError`` naming the field that cannot be read."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ClientError("messages must be a list of at least one message.", param="messages")
    result: list[Message] = []
    for index, message in enumerate(messages):
        read = _message(message, f"messages[{index}]")
        if read["role"] == "system" and all(earlier["role"] == "system" for earlier in result) and result:
            result[-1]["content"] = "\n\n".join(filter(None, (result[-1]["content"], read["content"])))
        else:
            result.append(read)
    return result


def check_tools(tools: object) -> list[Message] | None:
    """The tools of a request, None where there are none. Raises ``ClientError`` for anything but a list of objects."""
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ClientError("tools must be a list of objects.", param="tools")
    return [dict(tool) for tool in tools]


def with_arguments(messages: list[Message], as_text: bool) -> list[Message]:
    """The same messages with tool arguments as JSON text, or as objects where they are JSON objects.

    Text that is no object stays text (a model may have written it so); text stays as it was written.
    """
    read = _text if as_text else _object
    return [
        {
            **message,
            "tool_calls": [
                {**call, "function": {**call["function"], "arguments": read(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _object(arguments: Any) -> Any:
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ClientError(f"{where} must be an object with a role and a content.", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ClientError(f"{where}.role must be one of {', '.join(_ROLES)}.", param=f"{where}.role")
    result: Message = {"role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    for key, value in (("name", message.get("name")), ("tool_call_id", message.get("tool_call_id")), ("reasoning_content", reasoning)):
        if value is None:
            continue
        if not isinstance(value, str):
            raise ClientError(f"{where}.{key} must be a string.", param=f"{where}.{key}")
        result[key] = value
    if message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return result


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ClientError(f"{where} must be a string or a list of parts.", param=where)
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise ClientError(f"{where} must be an object with a type.", param=where)
    if kind not in _TEXT_PARTS:
        shown = kind if kind.isidentifier() and len(kind) < 40 else "of this type"
        raise ClientError(f"{where}: parts {shown!r} are not served here; this model reads text only.", param=where)
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ClientError(f"{where}.{_TEXT_PARTS[kind]} must be a string.", param=where)
    return text


def _tool_calls(calls: object, where: str) -> list[Message]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ClientError(f"{where} must be a list.", param=where)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ClientError(f"{where} must be an object with a function that has a name.", param=where)
    result: Message = {"type": "function", "function": {"name": function["name"], "arguments": _arguments(function, where)}}
    if isinstance(call.get("id"), str):
        result["id"] = call["id"]
    return result


def _arguments(function: Mapping[str, Any], where: str) -> Any:
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str):
        raise ClientError(f"{where}.function.arguments must be a string or an object.", param=where)
    return arguments
