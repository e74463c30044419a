"""What one client may take from the server: every cap and every timeout of the HTTP side, in one frozen place.

Caps are counts or bytes, timeouts are seconds of the loop's clock. The idle timeout is longer than the 60 s for which nginx
keeps a connection to a server behind it, so that the proxy closes first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from strata.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. ``header``: from the first byte of a request to its blank line (and from a connection's start to that byte);
    ``body``: without a byte of the body (and see ``Limits.body_rate``); ``idle``: between two requests; ``write``: a reader that takes
    nothing; ``linger``: how long a refused body is thrown away before the connection closes."""

    header: float = 10.0
    body: float = 30.0
    idle: float = 75.0
    write: float = 60.0
    linger: float = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Of connections and of what is read from or kept for one connection.

    ``per_address`` 0 is no cap. ``header_bytes`` bounds request line and headers together. ``ahead_bytes`` is how much of the
    next (pipelined) requests is read while one is being answered. ``body_rate``: bytes a second that a body comes at, at least, once
    ``timeouts.body`` is over. ``write_bytes`` may wait for a slow reader of a stream
    before it is cut off.
    """

    connections: int = 512
    per_address: int = 0
    header_bytes: int = 64 * 1024
    header_count: int = 128
    body_bytes: int = 32 * 1024 * 1024
    body_rate: int = 8 * 1024
    ahead_bytes: int = 64 * 1024
    write_bytes: int = 1024 * 1024
    timeouts: Timeouts = field(default_factory=Timeouts)

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        return cls(
            connections=settings.max_connections,
            per_address=settings.max_connections_per_address or 0,
            body_bytes=settings.max_body_mib * 1024 * 1024,
            timeouts=Timeouts(
                header=settings.header_timeout_s,
                body=settings.body_timeout_s,
                idle=settings.keep_alive_timeout_s,
                write=settings.write_timeout_s,
            ),
        )
