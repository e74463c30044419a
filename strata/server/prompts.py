"""From a body's ``prompt`` or ``messages`` to tokens. Runs on a worker thread: a long text takes its time.

A prompt is never cut. A raw prompt's special tokens count as such, because those who use /v1/completions write the template
themselves; in chat only the template writes special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import ClientError
from strata.messages import Tokens
from strata.server.fields import Fields
from strata.server.service import Service

MAX_PROMPTS = 256
MAX_MESSAGES = 16384
MAX_TOOLS = 1024
PROMPT_KINDS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


@dataclass(frozen=True, slots=True)
class Prompt:
    """``text`` is what ``echo`` gives back."""

    tokens: Tokens
    turn_marks: Tokens = ()
    text: str = ""


# ---------------------------------------------------------------- completions


def read_prompts(fields: Fields, service: Service) -> list[Prompt]:
    """Raises ``ClientError`` for a wrong type, an id out of the vocabulary, or a prompt without any token."""
    given = fields.value("prompt")
    if isinstance(given, str):
        return [_from_text(given, service)]
    if not isinstance(given, list) or not given:
        raise fields.error("prompt", PROMPT_KINDS)
    if all(isinstance(each, str) for each in given):
        return [_from_text(each, service) for each in _capped(given)]
    if all(isinstance(each, list) for each in given):
        return [_from_ids(fields, each, service) for each in _capped(given)]
    return [_from_ids(fields, given, service)]


def _capped(prompts: list[object]) -> list[object]:
    if len(prompts) > MAX_PROMPTS:
        raise ClientError(f"a request may have {MAX_PROMPTS} prompts", param="prompt")
    return prompts


def _from_text(text: object, service: Service) -> Prompt:
    assert isinstance(text, str)
    tokens = tuple(service.tokenizer.encode(text, add_special=True, parse_special=True))
    if not tokens:
        raise ClientError("the prompt is empty, and this model has no token that begins a text", param="prompt")
    return Prompt(tokens, text=text)


def _from_ids(fields: Fields, given: object, service: Service) -> Prompt:
    assert isinstance(given, list)
    tokens = read_ids(fields, "prompt", given, service.tokenizer.vocab_size, PROMPT_KINDS)
    if not tokens:
        raise ClientError("the prompt is empty: give at least one token", param="prompt")
    return Prompt(tokens, text=service.tokenizer.decode(tokens))


def read_ids(fields: Fields, name: str, given: list[object], vocab_size: int, kinds: str) -> Tokens:
    """Raises ``ClientError``: ``name`` must be one of ``kinds``, or hold ids of the vocabulary."""
    if not all(type(each) is int for each in given):
        raise fields.error(name, kinds)
    tokens: Tokens = tuple(given)  # type: ignore[arg-type]  # checked above; a cast per token would double the time
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise ClientError(f"token ids must be from 0 to {vocab_size - 1}", param=name)
    return tokens


# ---------------------------------------------------------------- chat


def read_chat(fields: Fields, service: Service) -> Prompt:
    """Raises ``ClientError`` for messages of a wrong shape, or that the model's template refuses."""
    if service.template is None:
        raise ClientError("this model's file has no chat template: use /v1/completions with the prompt written out")
    encoded = service.template.encode(
        service.tokenizer,
        read_messages(fields),
        tools=read_tools(fields),
        add_generation_prompt=fields.flag("add_generation_prompt", True),
        options=read_template_options(fields),
    )
    if not encoded.tokens:
        raise ClientError("the messages make an empty prompt", param="messages")
    return Prompt(tuple(encoded.tokens), tuple(encoded.turn_marks), encoded.text)


def read_messages(fields: Fields) -> list[dict[str, object]]:
    """Checked for shape: roles known, content text. Texts in parts are joined, because templates expect one string."""
    messages = fields.items("messages", MAX_MESSAGES)
    if not messages:
        raise fields.error("messages", "a list of at least one message")
    return [_read_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _read_message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, dict):
        raise ClientError(f"{where} must be an object", param="messages")
    if message.get("role") not in ROLES:
        raise ClientError(f"{where}.role must be one of {', '.join(ROLES)}", param="messages")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ClientError(f"{where}.tool_calls must be a list of objects", param="messages")
    return {**message, "content": _read_content(message.get("content"), f"{where}.content")}


def _read_content(content: object, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ClientError(f"{where} must be a string, null or a list of parts", param="messages")
    return "".join(_read_part(part, f"{where}[{n}]") for n, part in enumerate(content))


def _read_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in TEXT_PARTS:
        raise ClientError(f"{where} must be a part of type text: this model reads nothing else", param="messages")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ClientError(f"{where} must have a string as its text", param="messages")
    return text


def read_tools(fields: Fields) -> list[dict[str, object]] | None:
    """The tools for the template; None without any, or where ``tool_choice`` is none."""
    tools = fields.items("tools", MAX_TOOLS)
    if not all(isinstance(tool, dict) for tool in tools):
        raise fields.error("tools", "a list of objects")
    choice = fields.value("tool_choice")
    if choice not in (None, "none", "auto"):
        raise ClientError("tool_choice must be none or auto: a call cannot be forced by this server", param="tool_choice")
    return None if choice == "none" or not tools else [tool for tool in tools if isinstance(tool, dict)]


def read_template_options(fields: Fields) -> dict[str, object]:
    """What a client may tell the template: a short list of switches, because a template is a program."""
    given = fields.nested("chat_template_kwargs")
    options: dict[str, object] = {}
    for name in ("enable_thinking", "thinking", "preserve_thinking"):
        if given.has(name):
            options[name] = given.flag(name, False)
    for name in ("reasoning_effort",):
        effort = given.text(name, most=16) or fields.text(name, most=16)
        if effort:
            options[name] = effort
    return options
