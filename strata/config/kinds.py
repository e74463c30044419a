"""The kinds of values a setting can have: how each is read from text and JSON, shown, and described.

``parse`` reads what a shell passes (flags, environment); ``accept`` checks a typed value (JSON, Python). Both return the
value a ``Settings`` attribute holds, or raise ``ValueError``, whose text nobody sees: messages are made from ``range``,
so that an error, ``--help`` and docs/CONFIG.md always say the same.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

_ON = frozenset({"on", "true", "yes", "1"})
_OFF = frozenset({"off", "false", "no", "0"})


def _short(number: float) -> str:
    return repr(number).removesuffix(".0")


class Kind(Generic[T]):
    """One kind of value. ``metavar`` stands for it in ``--help``; ``range`` completes "must be ..."."""

    metavar = "VALUE"
    range = ""

    def parse(self, text: str) -> T:
        return self.accept(text)

    def accept(self, value: object) -> T:
        raise NotImplementedError

    def show(self, value: T) -> str:
        """``value`` as ``parse`` would read it."""
        return str(value)


class Integer(Kind[int]):
    """A whole number from ``low`` to ``high``, both included."""

    metavar = "N"

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.range = f"a whole number from {low} to {high}"

    def parse(self, text: str) -> int:
        if not re.fullmatch(r"[-+]?[0-9]{1,18}", text.strip()):
            raise ValueError
        return self.accept(int(text))

    def accept(self, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise ValueError
        return value


class Number(Kind[float]):
    """A finite number from ``low`` to ``high``; ``above`` leaves ``low`` itself out."""

    metavar = "X"

    def __init__(self, low: float, high: float, *, above: bool = False) -> None:
        self.low, self.high, self.above = low, high, above
        self.range = f"a number above {_short(low)}, up to {_short(high)}" if above else f"a number from {_short(low)} to {_short(high)}"

    def parse(self, text: str) -> float:
        return self.accept(float(text))

    def accept(self, value: object) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError
        if not self.low <= value <= self.high or (self.above and value == self.low):
            raise ValueError
        return float(value)

    def show(self, value: float) -> str:
        return _short(value)


class Switch(Kind[bool]):
    """On or off. On the command line the bare flag means on."""

    metavar = "on|off"
    range = "on or off"

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word not in _ON | _OFF:
            raise ValueError
        return word in _ON

    def accept(self, value: object) -> bool:
        if isinstance(value, str):
            return self.parse(value)
        if not isinstance(value, bool):
            raise ValueError
        return value

    def show(self, value: bool) -> str:
        return "on" if value else "off"


class Choice(Kind[str]):
    """One word of a few."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.metavar = "|".join(words)
        *others, last = words
        self.range = f"{', '.join(others)} or {last}" if others else f"{last} (this build serves nothing else)"

    def accept(self, value: object) -> str:
        if value not in self.words:
            raise ValueError
        return str(value)


class Text(Kind[str]):
    """Printable text, not empty. ``what`` names it in messages."""

    def __init__(self, metavar: str, what: str) -> None:
        self.metavar, self.range = metavar, what

    def accept(self, value: object) -> str:
        text = value.strip() if isinstance(value, str) else ""
        if not text or not text.isprintable():
            raise ValueError
        return text


class Names(Kind[tuple[str, ...]]):
    """Words separated by commas (in JSON also a list), each once, order kept."""

    metavar = "A,B,.."

    def __init__(self, what: str) -> None:
        self.range = f"{what} separated by commas"

    def parse(self, text: str) -> tuple[str, ...]:
        return () if text.strip().lower() == "none" else self.accept(text)

    def accept(self, value: object) -> tuple[str, ...]:
        words = value.split(",") if isinstance(value, str) else value
        if not isinstance(words, (list, tuple)):
            raise ValueError
        if not all(isinstance(word, str) and word.strip() and word.isprintable() and "," not in word for word in words):
            raise ValueError
        return tuple(dict.fromkeys(word.strip() for word in words))

    def show(self, value: tuple[str, ...]) -> str:
        return ",".join(value) or "none"


class Devices(Names):
    """Names or numbers of devices, in order; the same one may come again."""

    metavar = "D,D,.."

    def accept(self, value: object) -> tuple[str, ...]:
        words = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
        if not isinstance(words, (list, tuple)) or any(isinstance(word, bool) for word in words):
            raise ValueError
        words = [str(word) if isinstance(word, int) else word for word in words]
        for word in words:
            super().accept([word])
        return tuple(word.strip() for word in words)


class Integers(Kind[tuple[int, ...]]):
    """Whole numbers from ``low`` to ``high`` separated by commas (in JSON also a list), at least one. ``what`` names them in messages."""

    metavar = "N,N,.."

    def __init__(self, low: int, high: int, what: str) -> None:
        self._each = Integer(low, high)
        self.range = f"{what} separated by commas"

    def parse(self, text: str) -> tuple[int, ...]:
        return self.accept(tuple(self._each.parse(word) for word in text.split(",")))

    def accept(self, value: object) -> tuple[int, ...]:
        if isinstance(value, str):
            return self.parse(value)
        numbers = (value,) if isinstance(value, int) else value
        if not isinstance(numbers, (list, tuple)) or not numbers:
            raise ValueError
        return tuple(self._each.accept(number) for number in numbers)

    def show(self, value: tuple[int, ...]) -> str:
        return ",".join(map(str, value))


class FilePath(Kind[Path]):
    """A file's path. From a config file it counts from that file's folder, else from the current one; ``~`` is home."""

    metavar = "FILE"
    range = "a path"

    def accept(self, value: object) -> Path:
        if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
            raise ValueError
        try:
            return Path(value).expanduser()
        except RuntimeError:  # the home of nobody: a path that merely begins with ~
            return Path(value)


class Maybe(Kind["T | None"], Generic[T]):
    """``kind``, or the word that stands for None: ``auto`` (the server chooses) or ``none`` (there is none)."""

    def __init__(self, kind: Kind[T], word: str) -> None:
        self.kind, self.word = kind, word
        self.metavar = f"{kind.metavar}|{word}" if word == "auto" else kind.metavar
        self.range = f"{kind.range}, or {word}"

    def parse(self, text: str) -> T | None:
        return None if text.strip().lower() == self.word else self.kind.parse(text)

    def accept(self, value: object) -> T | None:
        return None if value is None or value == self.word else self.kind.accept(value)

    def show(self, value: T | None) -> str:
        return self.word if value is None else self.kind.show(value)
