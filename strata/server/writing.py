"""Watches a client that reads slowly: one that takes nothing for a whole timeout is cut off.

A slow but steady reader stays: what counts is that fewer bytes wait than at the last look.
"""

from __future__ import annotations

import asyncio


class WriteWatch:
    """``seconds``: the longest time without progress while the transport is above its high-water mark."""

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        self._transport = transport
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = 0

    @property
    def is_paused(self) -> bool:
        return self._timer is not None

    def paused(self) -> None:
        self._waiting = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)

    def resumed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self._transport.get_write_buffer_size() >= self._waiting:
            self._transport.abort()
        else:
            self.paused()
