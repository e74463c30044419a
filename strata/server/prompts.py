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
from strata.text.template import ChatTemplate

MAX_PROMPTS = 256
MAX_MESSAGES = 16384
MAX_TOOLS = 1024
NO_TEMPLATE = ChatTemplate({})  # refuses every chat, and says why
PROMPT_KINDS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


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
    service.tokenizer.check_length(text, service.model.context)
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
    """Raises ``ClientError`` for messages that cannot be read (strata.text says which can), or that the template refuses."""
    continues = fields.flag("continue_final_message", False) if fields.has("continue_final_message") else None
    encoded = (service.template or NO_TEMPLATE).encode(
        service.tokenizer,
        read_messages(fields),
        tools=read_tools(fields),
        add_generation_prompt=fields.flag("add_generation_prompt", True),
        continue_final_message=continues,
        options=read_template_options(fields),
        most_tokens=service.model.context,
    )
    if not encoded.tokens:
        raise ClientError("the messages make an empty prompt", param="messages")
    return Prompt(encoded.tokens, encoded.turn_marks, encoded.text)


def read_messages(fields: Fields) -> list[dict[str, object]]:
    messages = fields.items("messages", MAX_MESSAGES)
    if not messages:
        raise fields.error("messages", "a list of at least one message")
    return messages  # type: ignore[return-value]  # the template's first act is to check them


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
    """``chat_template_kwargs``, and OpenAI's ``reasoning_effort`` as the option of that name."""
    options = dict(fields.nested("chat_template_kwargs").values)
    effort = fields.text("reasoning_effort", most=64)
    if effort:
        options.setdefault("reasoning_effort", effort)
    return options
