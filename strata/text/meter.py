"""What one rendering of a chat template may cost: characters and elements made, and seconds.

Every operation that can repeat, copy or grow something is charged *before* or as it happens, so memory is bounded by the
allowance and a run stops at the deadline plus one operation. The deadline is only looked at now and then: a clock costs more
than most operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar

_LOOK_EVERY = 64  # charges between two looks at the clock
_LOOK_OVER = 1 << 16  # a charge this large is always followed by one


class RenderTooCostly(Exception):
    """The template made too much, or took too long."""


class Meter:
    """``allowance``: characters and elements; ``seconds`` from now on ``clock`` (monotonic)."""

    def __init__(self, allowance: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.left = allowance
        self._clock = clock
        self._end = clock() + seconds
        self._until_look = 0

    def charge(self, amount: int) -> None:
        """Raises ``RenderTooCostly`` where the allowance or the time is used up."""
        self.left -= amount + 1
        if self.left < 0:
            raise RenderTooCostly("it makes too much text")
        self._until_look -= 1
        if self._until_look < 0 or amount > _LOOK_OVER:
            self._until_look = _LOOK_EVERY
            if self._clock() > self._end:
                raise RenderTooCostly("it takes too long")

    def weigh(self, value: object) -> None:
        """Charges for a value as it would be written out: an element that stands in a list twice counts twice."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, dict):
            self.charge(len(value))
            for key, item in value.items():
                self.weigh(key)
                self.weigh(item)
        elif isinstance(value, (list, tuple, set, frozenset)):
            self.charge(len(value))
            for item in value:
                self.weigh(item)
        elif isinstance(value, int):
            self.charge(value.bit_length() // 3)
        else:
            self.charge(1)


METER: ContextVar[Meter] = ContextVar("METER")
