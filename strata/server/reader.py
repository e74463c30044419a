"""Feeds h11 in small pieces and remembers the raw bytes of the head being read.

Small, because h11's cap on a head counts only what has come in without its end: a whole head of any size that arrives at once
would pass. Raw, because h11 forgives bare LF and folded lines, which head.py does not.
"""

from __future__ import annotations

import contextlib

import h11

PIECE = 16 * 1024


class Reader:
    """``waiting``: bytes received and not yet given to h11."""

    def __init__(self, protocol: h11.Connection) -> None:
        self._h11 = protocol
        self._inbox = bytearray()
        self._raw_head = bytearray()

    @property
    def waiting(self) -> int:
        return len(self._inbox)

    @property
    def has_begun(self) -> bool:
        """A part of a head has arrived."""
        return bool(self._raw_head)

    def feed(self, data: bytes) -> None:
        self._inbox += data

    def next_event(self) -> object:
        """h11's next event; ``NEED_DATA`` when all bytes are used. Raises ``h11.RemoteProtocolError``."""
        while True:
            event = self._h11.next_event()
            if event is not h11.NEED_DATA or not self._inbox:
                return event
            piece = bytes(self._inbox[:PIECE])
            del self._inbox[:PIECE]
            if self._h11.their_state is h11.IDLE:
                self._raw_head += piece
            self._h11.receive_data(piece)

    def take_raw_head(self) -> bytes:
        """The bytes of the head that ``next_event`` has just returned."""
        left_over = len(self._h11.trailing_data[0])
        raw = bytes(self._raw_head[: len(self._raw_head) - left_over])
        self._raw_head.clear()
        return raw

    def next_request(self) -> None:
        """Both sides are done: what h11 still holds is the beginning of the next head."""
        self._h11.start_next_cycle()
        self._raw_head += self._h11.trailing_data[0]

    def skip_body(self) -> None:
        """Use up what has arrived of a body that nobody wants; whether it is well-formed no longer matters."""
        with contextlib.suppress(h11.RemoteProtocolError):
            while isinstance(self.next_event(), h11.Data):
                pass

    def clear(self) -> None:
        self._inbox.clear()
