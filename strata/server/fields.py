"""Reads typed values out of a request's JSON object; what is wrong is refused with the field's name and its range.

Rules: null is the same as absent; a bool is never a number; 100.0 is the integer 100; keys that nobody asks for are ignored.
Messages say what is right and never quote what was sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from strata.errors import ClientError

INT64_MAX = 2**63 - 1
_BOM = b"\xef\xbb\xbf"


def parse_object(body: bytes) -> Fields:
    """The body as ``Fields``. Raises ``ClientError`` for anything but one JSON object in UTF-8."""
    try:
        value = orjson.loads(body[3:] if body.startswith(_BOM) else body)
    except orjson.JSONDecodeError:
        raise ClientError("the body must be one JSON object in UTF-8") from None
    if not isinstance(value, dict):
        raise ClientError("the body must be a JSON object")
    return Fields(value)


class Fields:
    """Typed access to one JSON object, ``values``. ``where`` is put before names in messages (``stream_options.``)."""

    def __init__(self, values: Mapping[str, object], where: str = "") -> None:
        self.values = values
        self._where = where

    def value(self, name: str) -> object:
        """The raw value, None if absent."""
        return self.values.get(name)

    def also(self, name: str, value: object) -> Fields:
        """The same fields with ``name`` set."""
        return Fields({**self.values, name: value}, self._where)

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def error(self, name: str, must: str) -> ClientError:
        """``name`` must be such and such."""
        full = self._where + name
        return ClientError(f"{full} must be {must}", param=full)

    def flag(self, name: str, default: bool) -> bool:
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str = "", most: int = 1024) -> str:
        """A string of at most ``most`` characters."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > most:
            raise self.error(name, f"a string of at most {most} characters")
        return value

    def integer(self, name: str, low: int, high: int = INT64_MAX) -> int | None:
        value = self.value(name)
        if value is None:
            return None
        number = as_integer(value)
        if number is None or not low <= number <= high:
            raise self.error(name, _range("an integer", low, None if high == INT64_MAX else high))
        return number

    def number(self, name: str, low: float, high: float, above: bool = False) -> float | None:
        """A number from ``low`` (with ``above``: greater than it) to ``high``."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high or (above and value == low):
            kind = "a number" if not above else f"a number greater than {low:g},"
            raise self.error(name, f"{kind} at most {high:g}" if above else _range(kind, low, high))
        return float(value)

    def nested(self, name: str) -> Fields:
        """A nested object; an absent one is empty."""
        value = self.value(name)
        if value is None:
            return Fields({}, f"{self._where}{name}.")
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, f"{self._where}{name}.")

    def items(self, name: str, most: int) -> list[object]:
        """A list of at most ``most`` entries; an absent one is empty."""
        value = self.value(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise self.error(name, f"a list of at most {most} entries")
        return value


def as_integer(value: object) -> int | None:
    """``value`` if it is a whole number of 64 bits, else None. JSON writers of some clients know only floats."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= INT64_MAX:
        return value
    return None


def _range(kind: str, low: float, high: float | None) -> str:
    return f"{kind}, at least {low:g}" if high is None else f"{kind} from {low:g} to {high:g}"
