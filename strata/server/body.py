"""A request's body as it comes in: its parts, how large it may become, and how long it may still take.

Two bounds on time. A pause has ``timeouts.body`` seconds. All of it has as many, and a second more for every ``body_rate`` bytes that
have come: a client that sends a byte now and then would otherwise hold its connection for years.
"""

from __future__ import annotations

from collections.abc import Callable

from strata.server.head import body_too_large
from strata.server.limits import Limits


class Body:
    """``clock``: seconds of the loop."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._parts: list[bytes] = []
        self._size = 0
        self._began = 0.0

    def begin(self) -> None:
        """The head is there: what follows is the body."""
        self._parts, self._size, self._began = [], 0, self._clock()

    def take(self, data: bytes) -> None:
        """Raises ``TooLarge``."""
        self._size += len(data)
        if self._size > self._limits.body_bytes:
            raise body_too_large(self._limits)
        self._parts.append(data)

    @property
    def patience(self) -> float:
        """Seconds that the next bytes may take."""
        pause = self._limits.timeouts.body
        end = self._began + pause + self._size / self._limits.body_rate
        return max(0.0, min(pause, end - self._clock()))

    def whole(self) -> bytes:
        """All of it; nothing is kept."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
