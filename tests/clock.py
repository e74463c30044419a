"""An event loop whose time jumps: when nothing is ready, the next timer is due at once.

A test of timeouts takes no time and always the same path. The selector is asked first, so real sockets and
``call_soon_threadsafe`` still work; but time may jump over work in flight on another thread, so tests with threads
should wait for events, not timers. It is the standard selector loop: uvloop's time cannot be replaced.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

DEADLOCK_SECONDS = 10.0


class JumpClock(selectors.BaseSelector):
    """A selector that, instead of waiting, moves ``now`` (seconds) forward."""

    def __init__(self) -> None:
        self.now = 0.0
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready or timeout == 0:
            return ready
        if timeout is not None:
            self.now += max(timeout, 0.0)
            return ready
        # No timer is set: only a socket or a thread can go on from here.
        ready = self._real.select(DEADLOCK_SECONDS)
        if not ready:
            raise RuntimeError("the test waits for something that nothing will do: no timer, no socket, no thread")
        return ready

    def advance(self, seconds: float) -> None:
        """Let time pass without running anything."""
        self.now += seconds

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class JumpLoop(asyncio.SelectorEventLoop):
    """The standard loop on a ``JumpClock``; ``loop.time()`` is ``clock.now``."""

    def __init__(self, clock: JumpClock) -> None:
        super().__init__(clock)
        self.clock = clock

    def time(self) -> float:
        return self.clock.now
