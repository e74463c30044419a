"""One client connection: bytes in, exchanges out, one at a time; h11 knows the protocol, this file knows time and memory.

The life of a connection is its phase: ``idle`` (between requests), ``head``, ``body``, ``busy`` (an exchange is being answered),
``linger`` (a refused body is thrown away, so that the client reads the answer and not a reset), ``closed``. Each has its timer.
Reading goes on while an exchange is answered, which is how a client that leaves is noticed at once; what it sends ahead is
kept up to a cap. Who closes: ``_close`` and ``abort`` here and the watch of a stalled reader. ``connection_lost`` comes once,
however it ended, and cancels the handler's task: the one way in which a client's leaving reaches a handler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, cast

import h11

from strata.errors import EngineError, RequestTimeout, StrataError
from strata.server.body import Body
from strata.server.exchange import Exchange, Headers
from strata.server.head import (
    check_body_head,
    check_raw_head,
    http_date,
    make_head,
    nameless_head,
    protocol_error,
    too_many_connections,
)
from strata.server.limits import Limits
from strata.server.reader import Reader
from strata.server.writing import Writer

log = logging.getLogger("strata.server")


class Application(Protocol):
    """What answers. ``begin`` raises ``StrataError`` to refuse before the body is read, else it sets ``exchange.handler``."""

    def begin(self, exchange: Exchange) -> None: ...

    def finished(self, exchange: Exchange) -> None: ...


class Owner(Protocol):
    """Counts the connections. ``opened`` says whether there is room for this one."""

    def opened(self, connection: Connection, address: str) -> bool: ...

    def closed(self, connection: Connection, address: str) -> None: ...


class Connection(asyncio.Protocol):
    """See the head of this file."""

    def __init__(self, application: Application, owner: Owner, limits: Limits) -> None:
        self._application, self._owner, self._limits = application, owner, limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._writer: Writer
        self._address = ""
        # Reading.
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.header_bytes)
        self._reader = Reader(self._h11)
        self._body = Body(limits, self._loop.time)
        self._is_advancing = False
        # The phase and its timer.
        self._phase = ""
        self._timer: asyncio.TimerHandle | None = None
        # The exchange being answered; the head of its answer until there is more to write; no further request after it; not the first.
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._unsent = b""
        self._is_last = self._is_kept = False

    # ---------------------------------------------------------------- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's transports are no instances of that class
        self._transport = transport
        self._writer = Writer(transport, self._limits.timeouts.write)
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if isinstance(peer, tuple) else ""
        if self._owner.opened(self, self._address):
            self._enter("idle", self._limits.timeouts.header, self._close)
        else:
            transport.write(too_many_connections())
            self._close()

    def data_received(self, data: bytes) -> None:
        if self._phase not in ("linger", "closed"):
            self._reader.feed(data)
            self._advance()

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter("closed")
        self._writer.resume()
        if self._exchange is not None:
            self._exchange.leave()
            self._finish_exchange(self._exchange)
        if self._task is not None:
            self._task.cancel()
        self._owner.closed(self, self._address)

    def pause_writing(self) -> None:
        self._writer.pause()

    def resume_writing(self) -> None:
        self._writer.resume()
        self._transport.resume_reading()
        self._advance()

    # ---------------------------------------------------------------- called by the owner

    @property
    def is_busy(self) -> bool:
        """A request is being read or answered."""
        return self._phase in ("head", "body", "busy")

    def finish(self) -> None:
        """Answer what is under way and nothing after it."""
        self._is_last = True
        # The first request of a new connection may be on its way; of a kept one the client knows that it may be closed.
        if self._phase == "idle" and self._is_kept:
            self._close()

    def interrupt(self, error: StrataError) -> None:
        """End what is under way now, telling the client why."""
        self._is_last = True
        if self._phase == "busy" and self._exchange is not None and self._task is not None:
            self._exchange.interruption = error
            self._task.cancel()
        elif self._phase == "body":
            self._refuse(error)
        else:
            self._close()

    def abort(self) -> None:
        """Drop the connection with what is unsent."""
        self._transport.abort()

    # ---------------------------------------------------------------- reading

    def _advance(self) -> None:
        """Go as far as the bytes at hand allow. Answering can call back in here: then the outer call goes on."""
        if self._is_advancing:
            return
        self._is_advancing = True
        # A client that does not take its answers gets no further ones.
        while self._phase in ("idle", "head", "body") and not self._writer.is_paused and self._step():
            pass
        self._is_advancing = False
        if self._reader.waiting > self._limits.ahead_bytes:
            self._transport.pause_reading()

    def _step(self) -> bool:
        """Handle one event; False when more bytes are needed."""
        try:
            event = self._reader.next_event()
            if event is h11.NEED_DATA:
                self._wait_for_more()
                return False
            if isinstance(event, h11.Request):
                self._on_request(event)
            elif isinstance(event, h11.Data):
                self._body.take(bytes(event.data))
            else:
                self._on_body_end()
        except h11.RemoteProtocolError as error:
            self._refuse(protocol_error(error.error_status_hint))
        except StrataError as error:
            self._refuse(error)
        return True

    def _wait_for_more(self) -> None:
        if self._phase == "body":
            self._enter("body", self._body.patience, self._on_timeout)
        elif self._phase == "idle" and self._reader.has_begun:
            self._enter("head", self._limits.timeouts.header, self._on_timeout)

    def _on_request(self, event: h11.Request) -> None:
        self._body.begin()
        self._enter("body", self._body.patience, self._on_timeout)
        try:
            check_raw_head(self._reader.take_raw_head(), event, self._limits)
        except StrataError as error:
            return self._refuse(error, event.method.decode("ascii"))
        self._exchange = Exchange(self, make_head(event, self._address))
        self._application.begin(self._exchange)
        check_body_head(self._exchange.head, self._limits)
        if self._h11.they_are_waiting_for_100_continue:
            self._send(h11.InformationalResponse(status_code=100, headers=[]))

    def _on_body_end(self) -> None:
        assert self._exchange is not None
        self._exchange.body = self._body.whole()
        self._enter("busy")
        self._task = self._loop.create_task(self._answer(self._exchange))

    def _on_timeout(self) -> None:
        self._refuse(RequestTimeout("the request did not arrive in time"))

    # ---------------------------------------------------------------- answering

    async def _answer(self, exchange: Exchange) -> None:
        try:
            assert exchange.handler is not None
            await exchange.handler(exchange)
        except asyncio.CancelledError:
            # Only this connection cancels the task: the client has left, or the server is shutting down.
            if exchange.interruption is not None:
                exchange.fail(exchange.interruption)
        except StrataError as error:
            exchange.fail(error)
        except Exception:
            log.exception("request %s: a bug in the server", exchange.head.id)
            exchange.fail(EngineError(f"internal error; the server's log has it under request {exchange.head.id}"))
        if not exchange.is_over:
            self.abort()

    def _refuse(self, error: StrataError, method: str = "") -> None:
        """Answer without reading further. The connection goes on only if the whole request happens to be here."""
        if self._exchange is None:
            self._exchange = Exchange(self, nameless_head(self._address, method))
        elif self._h11.their_state is h11.SEND_BODY:
            self._reader.skip_body()
        self._exchange.fail(error)

    def send_head(self, status: int, headers: Headers, length: int | None) -> None:
        headers = (("Date", http_date()), *headers)
        if length is not None:
            headers = (*headers, ("Content-Length", str(length)))
        if self._is_last or self._h11.their_state is not h11.DONE:
            headers = (*headers, ("Connection", "close"))
        # Held back to leave in one segment with the first bytes of the body.
        self._unsent = self._h11.send(h11.Response(status_code=status, headers=list(headers))) or b""

    def send_body(self, data: bytes) -> None:
        assert self._exchange is not None
        if self._transport.get_write_buffer_size() > self._limits.write_bytes:
            self._exchange.leave()
            self.abort()
        else:
            self._send(h11.Data(data=data))

    def send_end(self) -> None:
        self._send(h11.EndOfMessage())
        assert self._exchange is not None
        self._finish_exchange(self._exchange)
        if self._h11.their_state is h11.DONE and not self._is_last:
            self._next_request()
        elif self._h11.their_state in (h11.SEND_BODY, h11.ERROR):
            self._linger()
        else:
            self._close()

    def _send(self, event: h11.Event) -> None:
        data = self._unsent + (self._h11.send(event) or b"")
        self._unsent = b""
        if data and not self._transport.is_closing():
            self._writer.write(data)

    def _finish_exchange(self, exchange: Exchange) -> None:
        self._exchange = None
        self._application.finished(exchange)

    def _next_request(self) -> None:
        self._reader.next_request()
        self._task = None
        self._is_kept = True
        self._enter("idle", self._limits.timeouts.idle, self._close)
        self._transport.resume_reading()
        self._advance()

    def _linger(self) -> None:
        self._reader.clear()
        self._enter("linger", self._limits.timeouts.linger, self.abort)
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _close(self) -> None:
        self._enter("closed")
        self._transport.close()

    def _enter(self, phase: str, seconds: float = 0.0, then: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._phase = phase
        if then is not None:
            self._timer = self._loop.call_later(seconds, then)
