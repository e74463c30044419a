"""The model's own chat template: from messages to the tokens of a prompt.

The template comes from the model file, never from a request, and runs in a ``Sandbox`` under a ``Meter``. Special tokens in
the result are those that the template wrote; the text of the messages stays text (``Protector``).

Turn marks. The prompt is also rendered up to each of the last user and tool turns, without what asks for an answer. Where
that is a beginning of the whole, the tokens that lie in it are there again when the conversation goes on: its end is a mark.

An assistant message at the end is continued (prefilled), as llama.cpp does and as vLLM does under ``continue_final_message``:
the messages before it are rendered with the generation prompt and its text follows, so the answer goes on in mid-sentence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2

from strata.errors import ClientError, ModelError
from strata.text.chat_tokens import EncodedChat, encode_marked
from strata.text.conversation import Message, check_tools, normalise, with_arguments
from strata.text.meter import METER, Meter, RenderTooCostly
from strata.text.options import check_options
from strata.text.protect import Protector, unmark
from strata.text.sandbox import Refusal, Sandbox
from strata.text.tokenizer import Tokenizer

_KEY = "tokenizer.chat_template"
_MAX_SOURCE = 1 << 20
_MARKED_TURNS = 4
_LONGEST_CLOSING = 64
_PROBE_ALLOWANCE = 1 << 18


@dataclass(frozen=True, slots=True)
class Limits:
    """What rendering one request may cost: ``allowance`` + ``per_char`` x its size, in characters and elements made (see
    ``Meter``), and ``seconds``. A real template needs a few for each character."""

    allowance: int = 1 << 24
    per_char: int = 64
    seconds: float = 5.0


class ChatTemplate:
    """``sources``: template texts by name, ``default`` the main one, ``tool_use`` for requests with tools."""

    def __init__(
        self, sources: Mapping[str, str], now: Callable[[], datetime] = datetime.now, limits: Limits = Limits()
    ) -> None:
        """Raises ``ModelError`` for a template that does not compile. ``now``: the clock of templates that write the date."""
        sandbox = Sandbox(now)
        self.sources = dict(sources)
        self._limits = limits
        self._templates = {name: _load(sandbox, name, source) for name, source in sources.items()}
        self._paste_arguments = {name for name, template in self._templates.items() if _pastes_arguments(template)}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], now: Callable[[], datetime] = datetime.now) -> ChatTemplate:
        """From a GGUF's metadata; a file without a template gives one that refuses every chat and says why."""
        sources = {}
        for key, value in metadata.items():
            if key == _KEY or key.startswith(_KEY + "."):
                if not isinstance(value, str):
                    raise ModelError(f"{key} must be a string.")
                sources[key[len(_KEY) + 1 :] or "default"] = value
        return cls(sources, now)

    @property
    def exists(self) -> bool:
        """Whether chat requests can be served at all."""
        return bool(self._templates)

    @property
    def supports_tools(self) -> bool:
        """Whether the template shows ``tools`` to the model."""
        return any("tools" in source for source in self.sources.values())

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> EncodedChat:
        """The prompt of a chat request.

        ``continue_final_message``: the last message is the assistant's and is continued; None: if it is one and an answer is
        asked for. ``options``: the request's ``chat_template_kwargs`` (``strata.text.options`` says which are known).
        Raises ``ClientError``: messages that cannot be read, that the template refuses (with the template's words), or whose
        rendering costs too much; a model without a template.
        """
        turns, chosen_tools, checked = normalise(messages), check_tools(tools), check_options(options or {})
        name = self._choose(bool(chosen_tools))
        prefill = _take_prefill(turns, add_generation_prompt, continue_final_message)
        guard, assistant_guard = _guards(tokenizer, self.sources[name])
        try:
            turns = with_arguments(turns, name in self._paste_arguments)
            marked = [_marked(turn, assistant_guard if turn["role"] == "assistant" else guard) for turn in turns]
            variables = {
                "documents": None,
                "tools": guard.mark(chosen_tools),
                **guard.mark(checked),
                "bos_token": _text_of(tokenizer, tokenizer.bos),
                "eos_token": _text_of(tokenizer, tokenizer.eos),
            }
            whole, cuts = self._render(name, marked, variables, add_generation_prompt or prefill is not None)
        except RecursionError:
            raise ClientError("The messages or tools are nested too deeply.", param="messages") from None
        return encode_marked(tokenizer, whole + assistant_guard.mark(prefill or ""), cuts)

    def _choose(self, with_tools: bool) -> str:
        if not self._templates:
            raise ClientError(
                f"This model's file has no chat template ({_KEY}), so it cannot be given messages. "
                "Use /v1/completions with a prompt in the model's own format, or a file with a template.",
                param="messages",
                code="no_chat_template",
            )
        if with_tools and "tool_use" in self._templates:
            return "tool_use"
        return "default" if "default" in self._templates else min(self._templates)

    def _render(self, name: str, messages: list[Message], variables: dict[str, Any], ask: bool) -> tuple[str, list[int]]:
        """The whole conversation as text, and where the last user and tool turns end in it."""
        template = self._templates[name]
        size = sum(len(str(message)) for message in messages) + len(str(variables))
        token = METER.set(Meter(self._limits.allowance + self._limits.per_char * size, self._limits.seconds))
        try:
            whole = template.render(messages=messages, add_generation_prompt=ask, **variables)
            return whole, _turn_ends(template, messages, variables, whole)
        except Exception as error:
            raise _client_error(error) from error
        finally:
            METER.reset(token)


def _load(sandbox: Sandbox, name: str, source: str) -> jinja2.Template:
    key = _KEY if name == "default" else f"{_KEY}.{name}"
    if len(source) > _MAX_SOURCE:
        raise ModelError(f"{key} has {len(source)} characters; at most {_MAX_SOURCE} are read.")
    try:
        return sandbox.load(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"{key} does not compile: line {error.lineno}: {error.message}") from error
    except Exception as error:  # a hostile source fails in Python's own compiler: nesting, recursion, memory
        raise ModelError(f"{key} does not compile: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=8)
def _guards(tokenizer: Tokenizer, source: str) -> tuple[Protector, Protector]:
    """What must not come out of messages: of others than the assistant, and of the assistant.

    Markup that is an ordinary token (``</think>``) stays whole in what the assistant said, for templates look for it there.
    """
    control = {text for text in tokenizer.specials.ids if text not in tokenizer.markup}
    structure = {text for text in tokenizer.markup if text in source and not text.isspace() and not text.isalnum()}
    return Protector(control | structure), Protector(control)


def _marked(turn: Message, guard: Protector) -> Message:
    return {key: value if key == "role" else guard.mark(value) for key, value in turn.items()}


def _take_prefill(turns: list[Message], ask: bool, wanted: bool | None) -> str | None:
    """Takes the assistant's message off the end and returns its text, if it is to be continued."""
    last = turns[-1]
    if last["role"] != "assistant" or "tool_calls" in last:
        if wanted:
            raise ClientError("continue_final_message needs an assistant message with text at the end.", param="continue_final_message")
        return None
    if not (ask if wanted is None else wanted):
        return None
    if "reasoning_content" in last:
        raise ClientError("A last assistant message that is to be continued cannot carry reasoning_content.", param="messages")
    return str(turns.pop()["content"])


def _turn_ends(template: jinja2.Template, messages: list[Message], variables: dict[str, Any], whole: str) -> list[int]:
    asked = [index for index, message in enumerate(messages) if message["role"] in ("user", "tool")]
    ends = set()
    for index in asked[-_MARKED_TURNS:]:
        try:
            part = template.render(messages=messages[: index + 1], add_generation_prompt=False, **variables)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError):
            continue  # a template may refuse a part of a conversation that it takes as a whole
        same = len(part) if whole.startswith(part) else len(os.path.commonprefix((part, whole)))
        # Some templates close a conversation that asks for nothing with an end token, which the whole does not have here.
        if same == len(part) or index == asked[-1] and len(part) - same <= _LONGEST_CLOSING:
            ends.add(same)
    return sorted(ends - {0})


def _client_error(error: Exception) -> ClientError:
    if isinstance(error, Refusal):
        text = str(error)
    elif isinstance(error, RenderTooCostly):
        text = f"The model's chat template was stopped on these messages: {error}."
    elif isinstance(error, jinja2.TemplateError):
        text = f"The model's chat template cannot render these messages: {error}"
    else:
        text = f"The model's chat template cannot render these messages ({type(error).__name__})."
    return ClientError(unmark(text), param="messages", code="chat_template_error")


def _text_of(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_text(token)


def _pastes_arguments(template: jinja2.Template) -> bool:
    """Whether the template writes tool arguments as they are: an object comes out in Python's notation, or only text renders."""
    as_object = _probe(template, {"argument": "value"})
    if as_object is None:
        return _probe(template, '{"argument": "value"}') is not None
    return "{'argument'" in as_object


def _probe(template: jinja2.Template, arguments: object) -> str | None:
    """A conversation with a tool call as this template writes it; None where it does not take it."""
    call = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    tool = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    token = METER.set(Meter(_PROBE_ALLOWANCE, math.inf))  # no clock: what is found must not depend on the machine
    try:
        return template.render(messages=messages, tools=[tool], add_generation_prompt=False, bos_token="", eos_token="")
    except Exception:  # what the template says about real conversations is reported when they come
        return None
    finally:
        METER.reset(token)
