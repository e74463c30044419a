"""Measures how late the event loop is: a timer once a second, and by how much it was missed.

Everything of the server that must be quick runs on that loop, so its lateness is what a stall looks like from outside.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SECONDS = 1.0


class Heartbeat:
    """``observe`` gets the seconds of each delay."""

    def __init__(self, observe: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._observe = observe
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        due = self._clock() + SECONDS
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self._beat, due)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self, due: float) -> None:
        self._observe(max(0.0, self._clock() - due))
        self.start()
