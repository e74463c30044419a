"""The filters and tests that a chat template may use: a short list, each charged to the meter of the rendering.

Those that can multiply their subject (``replace``, ``join``, ``indent``) are our own and charge before they work; ``tojson`` is
that of the models' authors (no HTML escaping); ``safe`` does nothing, for nothing here is HTML.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, cast

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.tests import TESTS

from strata.text.meter import METER

_MAX_INDENT = 64
_TEXT_FILTERS = "capitalize lower string title trim truncate upper urlencode wordcount"
_OTHER_FILTERS = (
    "abs attr count d default dictsort first float int items last length list map max min reject rejectattr"
    " reverse select selectattr sort unique"
)


def make_filters() -> dict[str, Callable[..., Any]]:
    """The filters by name."""
    texts = {name: _metered(_jinja(name), writes=True) for name in _TEXT_FILTERS.split()}
    others = {name: _metered(_jinja(name)) for name in _OTHER_FILTERS.split()}
    own: dict[str, Callable[..., Any]] = {"indent": _indent, "join": join, "replace": replace, "round": _round, "tojson": _tojson}
    return {**texts, **others, **own, "e": _escape, "escape": _escape, "safe": _safe}


def make_tests() -> dict[str, Callable[..., Any]]:
    """The tests by name (``is string``)."""
    return {name: _metered(cast(Callable[..., Any], test)) for name, test in TESTS.items()}


def charge_size(value: object) -> None:
    """Charges for what has been made, by its length."""
    if isinstance(value, (str, list, tuple, dict)):
        METER.get().charge(len(value))


def _metered(function: Callable[..., Any], writes: bool = False) -> Callable[..., Any]:
    """A filter or test that is charged for its result, and if it ``writes`` its subject out as text, for that in advance."""
    subject = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        if writes and len(args) > subject:
            METER.get().weigh(args[subject])
        result = function(*args, **kwargs)
        METER.get().charge(1)
        charge_size(result)
        return result

    return metered


def _jinja(name: str) -> Callable[..., Any]:
    return cast(Callable[..., Any], FILTERS[name])


def _escape(value: Any) -> str:
    """A plain string: Jinja2's own type would escape whatever is added to it later."""
    METER.get().weigh(value)
    return str(_jinja("escape")(str(value)))


def _safe(value: Any) -> str:
    METER.get().weigh(value)
    return str(value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, Iterator):  # what `map` and `select` give
        value = list(value)
    METER.get().weigh(value)
    if indent is not None and not 0 <= int(indent) <= 16:
        raise SecurityError("'tojson' with an indent of more than 16 is not allowed here")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    METER.get().charge(len(text))
    return text


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    size = width if isinstance(width, int) else len(width)
    if size > _MAX_INDENT:
        raise SecurityError(f"'indent' by more than {_MAX_INDENT} is not allowed here")
    METER.get().weigh(value)
    METER.get().charge((str(value).count("\n") + 1) * max(size, 0))
    return str(_jinja("indent")(str(value), width, first, blank))


def replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    """As ``str.replace``, charged for its result in advance."""
    METER.get().weigh(value)
    text, old, new = str(value), str(old), str(new)
    limit = -1 if count is None else int(count)
    found = text.count(old) if limit < 0 else min(text.count(old), limit)
    METER.get().charge(len(text) + found * len(new))
    return text.replace(old, new, limit)


def join(value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    """``value`` as text with ``d`` between, charged for its result in advance."""
    parts = [item if attribute is None else _attribute(item, attribute) for item in value]
    for part in parts:
        METER.get().weigh(part)
        METER.get().charge(len(str(d)))
    return str(d).join(map(str, parts))


def _attribute(item: Any, path: str | int) -> Any:
    for name in str(path).split("."):
        item = item[int(name) if name.isdigit() else name]
    return item


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if not 0 <= precision <= 15:
        raise SecurityError("'round' to more than 15 places is not allowed here")
    return float(_jinja("round")(value, precision, method))
