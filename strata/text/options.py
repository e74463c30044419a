"""Which switches a request may give to the chat template (``chat_template_kwargs``), and of what type.

A closed list: a template is a program, and a request must not reach the variables that it relies on. The names are those that
the families' templates read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata.errors import ClientError

OPTIONS: dict[str, type] = {
    "enable_thinking": bool,
    "thinking": bool,
    "thinking_budget": int,
    "reasoning_effort": str,
    "preserve_thinking": bool,
    "clear_thinking": bool,
    "keep_past_thinking": bool,
    "truncate_history_thinking": bool,
    "skip_thinking": bool,
    "tools_in_user_message": bool,
    "date_string": str,
    "model_identity": str,
}
_MAX_TEXT = 4096


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, checked; one that is null is left out. Raises ``ClientError`` for an unknown one or a wrong type."""
    checked = {}
    for key, value in options.items():
        kind = OPTIONS.get(key)
        if kind is None:
            raise ClientError(f"chat_template_kwargs: only {', '.join(OPTIONS)} can be set.", param="chat_template_kwargs")
        if value is None:
            continue
        if type(value) is not kind or (isinstance(value, str) and len(value) > _MAX_TEXT):
            raise ClientError(f"chat_template_kwargs.{key} must be of type {kind.__name__}.", param=f"chat_template_kwargs.{key}")
        checked[key] = value
    return checked
