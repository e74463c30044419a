"""One chat template, compiled: rendered within limits, with the places where the last user and tool turns end.

Turn ends. The conversation is also rendered up to each of its last user and tool turns, without what asks for an answer. Where
that is a beginning of the whole, its end is a turn end: what lies before will be there again when the conversation goes on.

Tool arguments. Most templates write an object as JSON; some paste text. Which, is found out once, by a probe.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import jinja2

from strata.errors import ClientError, ModelError
from strata.text.conversation import Message
from strata.text.meter import METER, Meter, RenderTooCostly
from strata.text.protect import unmark
from strata.text.sandbox import Refusal, Sandbox

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


class CompiledTemplate:
    """``source``: its text. ``pastes_arguments``: tool arguments must come as JSON text, not as objects."""

    def __init__(self, sandbox: Sandbox, key: str, source: str) -> None:
        """Raises ``ModelError``, naming ``key``, for a source that does not compile."""
        self.source = source
        self._template = _load(sandbox, key, source)
        self.pastes_arguments = self._pastes_arguments()

    def render(self, messages: list[Message], variables: dict[str, Any], ask: bool, limits: Limits) -> tuple[str, list[int]]:
        """The whole conversation as text, and where the last user and tool turns end in it (rising).

        ``ask``: with what asks for an answer. Raises ``ClientError``: the template refuses (its words), fails, or costs too much.
        """
        size = sum(len(str(message)) for message in messages) + len(str(variables))
        token = METER.set(Meter(limits.allowance + limits.per_char * size, limits.seconds))
        try:
            whole = self._template.render(messages=messages, add_generation_prompt=ask, **variables)
            return whole, self._turn_ends(messages, variables, whole)
        except Exception as error:
            raise _client_error(error) from error
        finally:
            METER.reset(token)

    def _turn_ends(self, messages: list[Message], variables: dict[str, Any], whole: str) -> list[int]:
        asked = [index for index, message in enumerate(messages) if message["role"] in ("user", "tool")]
        ends = set()
        for index in asked[-_MARKED_TURNS:]:
            try:
                part = self._template.render(messages=messages[: index + 1], add_generation_prompt=False, **variables)
            except (jinja2.TemplateError, TypeError, ValueError, LookupError):
                continue  # a template may refuse a part of a conversation that it takes as a whole
            if whole.startswith(part):
                ends.add(len(part))
            elif index == asked[-1]:
                # Some templates close a conversation that asks for nothing with an end token, which the whole does not have here.
                same = len(os.path.commonprefix((part, whole)))
                ends |= {same} if len(part) - same <= _LONGEST_CLOSING else set()
        return sorted(ends - {0})

    def _pastes_arguments(self) -> bool:
        """An object comes out in Python's notation, or only text renders at all."""
        as_object = self._probe({"argument": "value"})
        if as_object is None:
            return self._probe('{"argument": "value"}') is not None
        return "{'argument'" in as_object

    def _probe(self, arguments: object) -> str | None:
        """A conversation with a tool call as this template writes it; None where it does not take it."""
        call = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        tool = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}}
        messages = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        token = METER.set(Meter(_PROBE_ALLOWANCE, math.inf))  # no clock: what is found must not depend on the machine
        try:
            return self._template.render(messages=messages, tools=[tool], add_generation_prompt=False, bos_token="", eos_token="")
        except Exception:  # what the template says about real conversations is reported when they come
            return None
        finally:
            METER.reset(token)


def _load(sandbox: Sandbox, key: str, source: str) -> jinja2.Template:
    if len(source) > _MAX_SOURCE:
        raise ModelError(f"{key} has {len(source)} characters; at most {_MAX_SOURCE} are read.")
    try:
        return sandbox.load(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"{key} does not compile: line {error.lineno}: {error.message}") from error
    except Exception as error:  # a hostile source fails in Python's own compiler: nesting, recursion, memory
        raise ModelError(f"{key} does not compile: {type(error).__name__}: {error}") from error


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
