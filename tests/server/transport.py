"""A transport without a socket: what a connection writes, and a client that may stop reading."""

from __future__ import annotations

import asyncio
from typing import Any


class MemoryTransport(asyncio.Transport):
    """What a connection writes to. ``stalled``: the client reads nothing, so bytes stay in the buffer."""

    HIGH = 64 * 1024

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address
        self.sent = bytearray()
        self.news = asyncio.Event()
        self.stalled = False
        self.waiting = 0
        self.is_reading = True
        self.has_written_eof = False
        self.is_closed = False
        self.protocol: Any = None
        self._closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.address, 1234) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._closing, "written after close"
        self.sent += data
        self.news.set()
        if self.stalled:
            was_below = self.waiting <= self.HIGH
            self.waiting += len(data)
            if was_below and self.waiting > self.HIGH:
                self.protocol.pause_writing()

    def read_some(self, count: int) -> None:
        """The stalled client takes ``count`` bytes."""
        was_above = self.waiting > self.HIGH
        self.waiting -= count
        if was_above and self.waiting <= self.HIGH:
            self.protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self._closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_written_eof = True
        self.news.set()

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def close(self) -> None:
        self._lose(None)

    def abort(self) -> None:
        self._lose(ConnectionAbortedError())

    def _lose(self, error: Exception | None) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._lost, error)

    def _lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self.news.set()
        self.protocol.connection_lost(error)
