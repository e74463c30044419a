"""Watches a client that reads slowly: one that takes nothing for a whole timeout is cut off.

A slow but steady reader stays: what counts is that it has taken something since the last look. How much may wait for it is
bounded elsewhere (``Limits.write_bytes``).
"""

from __future__ import annotations

import asyncio


class Writer:
    """``seconds``: the longest time without progress while the transport is above its high-water mark."""

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        self._transport = transport
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._written = 0
        self._taken = 0

    def write(self, data: bytes) -> None:
        self._written += len(data)
        self._transport.write(data)

    @property
    def is_paused(self) -> bool:
        return self._timer is not None

    def pause(self) -> None:
        self._taken = self._written - self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)

    def resume(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self._written - self._transport.get_write_buffer_size() > self._taken:
            self.pause()
        else:
            self._transport.abort()
