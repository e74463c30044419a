"""Accepts connections, counts and caps them, and ends them at shutdown.

Draining goes in three steps, so that a router sees it coming: ``drain`` lets every connection answer what is under way and no
more, while new connections are still accepted (``/ready`` answers 503 there, and the application refuses new work); when
nothing is under way, or the time is over, streams are ended with an error event; ``close`` then closes the socket and what
is left. Both may be called twice and at any time.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from strata.errors import Draining, StartError
from strata.server.connection import Application, Connection
from strata.server.limits import Limits

BACKLOG = 1024
CLOSE_SECONDS = 1.0


class Served(Application, Protocol):
    """An application that wants to know when the port opens (with a count of the open connections) and closes."""

    def started(self, connections: Callable[[], int]) -> None: ...

    def stopped(self) -> None: ...


class Listener:
    """One listening port."""

    def __init__(self, application: Served, limits: Limits) -> None:
        self._application = application
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._per_address: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._is_draining = False

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises ``StartError`` that names host and port and says what to do."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._new_connection, host, port, backlog=BACKLOG)
        except (OSError, UnicodeError) as error:
            raise StartError(f"cannot listen on {host}:{port}: {_advice(error)}") from error
        self._application.started(lambda: len(self._connections))

    @property
    def address(self) -> tuple[str, int]:
        """Host and port really listened on (port 0 asks for any)."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def drain(self, seconds: float) -> None:
        """Wait until no request is under way, ``seconds`` at most; then end what is left with ``Draining``."""
        self._is_draining = True
        for connection in tuple(self._connections):
            connection.finish()
        await self._wait_until(lambda: not any(each.is_busy for each in self._connections), seconds)
        for connection in tuple(self._connections):
            if connection.is_busy:
                connection.interrupt(Draining("the server is shutting down"))

    async def close(self) -> None:
        """Stop listening and close every connection; returns when they are closed."""
        if self._server is not None:
            self._server.close()
            self._application.stopped()
        for connection in tuple(self._connections):
            connection.interrupt(Draining("the server is shutting down"))
        await self._wait_until(lambda: not self._connections, CLOSE_SECONDS)
        for connection in tuple(self._connections):
            connection.abort()
        await self._wait_until(lambda: not self._connections, CLOSE_SECONDS)

    # ---------------------------------------------------------------- the connections' owner

    def opened(self, connection: Connection, address: str) -> bool:
        self._connections.add(connection)
        self._per_address[address] += 1
        per_address = self._limits.per_address
        is_full = len(self._connections) > self._limits.connections
        return not is_full and not (per_address and self._per_address[address] > per_address)

    def closed(self, connection: Connection, address: str) -> None:
        self._connections.discard(connection)
        self._per_address[address] -= 1
        if not self._per_address[address]:
            del self._per_address[address]
        self._changed.set()

    def _new_connection(self) -> Connection:
        connection = Connection(self._application, self, self._limits)
        if self._is_draining:
            connection.finish()
        return connection

    async def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Looks again whenever a connection has closed, which every busy one does once it has been told to finish."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not condition():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                return


def _advice(error: OSError | UnicodeError) -> str:
    if isinstance(error, (socket.gaierror, UnicodeError)):  # the latter of a name that DNS could not even be asked for
        return "no such host name. Give an address of this machine with --host"
    if error.errno == errno.EADDRINUSE:
        return "the port is in use. Stop the program that uses it, or choose another port with --port"
    if error.errno == errno.EACCES:
        return "not allowed. Ports below 1024 belong to the system: choose another with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "not an address of this machine. Give one that is with --host"
    return f"{error.strerror or error}. Choose other values with --host and --port"
