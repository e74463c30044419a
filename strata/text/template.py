"""The model's own chat template: from messages to the tokens of a prompt.

The template comes from the model file, never from a request, and runs in a ``Sandbox`` under a ``Meter``. Special tokens in
the result are those that the template wrote; the text of the messages stays text (``Protector``).

An assistant message at the end is continued (prefilled), as llama.cpp does and as vLLM does under ``continue_final_message``:
the messages before it are rendered with the generation prompt and its text follows, so the answer goes on in mid-sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from strata.errors import ClientError, ModelError
from strata.text.chat_tokens import EncodedChat, encode_marked
from strata.text.conversation import Message, check_tools, normalise, with_arguments
from strata.text.options import check_options
from strata.text.protect import Protector
from strata.text.rendering import CompiledTemplate, Limits
from strata.text.sandbox import Sandbox
from strata.text.tokenizer import Tokenizer

_KEY = "tokenizer.chat_template"
_CONTROL_LOOK = re.compile(r"<[|｜][^\s|｜<>]+[|｜]>")


class ChatTemplate:
    """``sources``: template texts by name, ``default`` the main one, ``tool_use`` for requests with tools."""

    def __init__(
        self, sources: Mapping[str, str], now: Callable[[], datetime] = datetime.now, limits: Limits = Limits()
    ) -> None:
        """Raises ``ModelError`` for a template that does not compile. ``now``: the clock of templates that write the date."""
        sandbox = Sandbox(now)
        self._limits = limits
        keys = {name: _KEY if name == "default" else f"{_KEY}.{name}" for name in sources}
        self._templates = {name: CompiledTemplate(sandbox, keys[name], source) for name, source in sources.items()}

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
        return any("tools" in template.source for template in self._templates.values())

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | None = None,
        options: Mapping[str, Any] | None = None,
        most_tokens: int | None = None,
    ) -> EncodedChat:
        """The prompt of a chat request.

        ``continue_final_message``: the last message is the assistant's and is continued; None: if it is one and an answer is
        asked for. ``options``: the request's ``chat_template_kwargs`` (``strata.text.options`` says which are known).
        Raises ``ClientError``: messages that cannot be read, that the template refuses (with the template's words), or whose
        rendering costs too much; a model without a template; ``ContextExceeded`` where the text must have over ``most_tokens``.
        """
        turns, chosen_tools, checked = normalise(messages), check_tools(tools), check_options(options or {})
        template = self._choose(bool(chosen_tools))
        prefill = _take_prefill(turns, add_generation_prompt, continue_final_message)
        guard, assistant_guard = _guards(tokenizer, template.source)
        try:
            turns = with_arguments(turns, template.pastes_arguments)
            marked = [_marked(turn, assistant_guard if turn["role"] == "assistant" else guard) for turn in turns]
            variables = {
                "documents": None,
                "tools": guard.mark(chosen_tools),
                **guard.mark(checked),
                "bos_token": _text_of(tokenizer, tokenizer.bos),
                "eos_token": _text_of(tokenizer, tokenizer.eos),
            }
            whole, cuts = template.render(marked, variables, add_generation_prompt or prefill is not None, self._limits)
        except RecursionError:
            raise ClientError("The messages or tools are nested too deeply.", param="messages") from None
        tokenizer.check_length(whole, most_tokens)
        return encode_marked(tokenizer, whole + assistant_guard.mark(prefill or ""), cuts)

    def _choose(self, with_tools: bool) -> CompiledTemplate:
        if not self._templates:
            raise ClientError(
                f"This model's file has no chat template ({_KEY}), so it cannot be given messages. "
                "Use /v1/completions with a prompt in the model's own format, or a file with a template.",
                param="messages",
                code="no_chat_template",
            )
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates["default" if "default" in self._templates else min(self._templates)]


@lru_cache(maxsize=8)
def _guards(tokenizer: Tokenizer, source: str) -> tuple[Protector, Protector]:
    """What must not come out of messages: of others than the assistant, and of the assistant.

    Of the USER_DEFINED tokens those are kept out that the template writes or that look like control tokens; runs of spaces and
    the like are text. They stay whole in what the assistant said: templates look there for ``</think>``.
    """
    control = {text for text in tokenizer.specials.ids if text not in tokenizer.markup}
    written = {text for text in tokenizer.markup if text in source and not text.isspace() and not text.isalnum()}
    structure = written | {text for text in tokenizer.markup if _CONTROL_LOOK.fullmatch(text)}
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


def _text_of(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_text(token)
