"""The asyncio shell of the slot machine: one queue of events in, commands out to engine and streams. It decides nothing.

Everything runs on the loop's thread; the engine's threads come in through ``call_soon_threadsafe``. Commands are carried out in the
order in which the machine gave them, even when a ``deliver`` callback sends the next event: they queue up, and one loop drains them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable

from strata.errors import EngineDead
from strata.messages import (
    Cancelled, Engine, EngineEvent, EngineFailed, Failed, Finished, PageCopy, RequestEvent, Window,
)
from strata.request import Request
from strata.slots import events
from strata.slots.events import Command, Event, Trace
from strata.slots.machine import SlotMachine
from strata.slots.view import MachineView

log = logging.getLogger(__name__)

Deliver = Callable[[RequestEvent], None]
IDLE_CHECK_S = 1.0
"""The books are checked when nothing has happened for this long; it costs milliseconds with large histories."""

HOST_LOOK_S = 5.0
"""While requests run, free host memory is looked at this often."""


class SlotManager:
    """Feeds ``machine`` and obeys it.

    ``clock``: monotonic seconds. ``host_free``: free host memory in bytes, None for no floor. ``trace``: gets one ``Trace`` per request
    that was seated, when it has ended.
    """

    def __init__(
        self, machine: SlotMachine, engine: Engine, clock: Callable[[], float], host_free: Callable[[], int] | None = None,
        trace: Callable[[Trace], None] | None = None,
    ) -> None:
        self.machine = machine
        self.engine = engine
        self.clock = clock
        self.host_free = host_free
        self.trace = trace
        self._streams: dict[str, Deliver] = {}
        self._commands: deque[Command] = deque()
        self._is_draining_commands = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._idle_check: asyncio.TimerHandle | None = None
        self._is_idle = asyncio.Event()
        self._is_closed = False
        self._looked_at = -math.inf
        self._due = math.inf

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the engine; its reports reach the machine on ``loop``."""
        self._loop = loop
        self._is_idle.set()
        self.engine.start(self._from_engine)

    def submit(self, request: Request, deliver: Deliver, packed: bytes = b"") -> None:
        """Admit a request. Its events go to ``deliver`` on the loop's thread, ending with one terminal event.

        ``packed``: optional ``pack(request.prompt)``, where the caller made it off the loop thread.
        Raises ``QueueFull``, ``Draining``, ``EngineDead`` or ``ClientError``; then nothing is delivered.
        """
        if self._is_closed:
            raise EngineDead("The server has been closed.")
        commands = self.machine.receive(events.Arrive(request, packed), self.clock())
        self._streams[request.id] = deliver
        self._obey(commands)

    def cancel(self, request_id: str) -> None:
        """The client left. Its seat is free within one window; nothing happens if the request has ended."""
        self._feed(events.Cancel(request_id))

    def stop(self, request_id: str) -> None:
        """A stop string was found: the request finishes now with reason ``stop``, its history stays."""
        self._feed(events.Stop(request_id))

    def view(self) -> MachineView:
        """A frozen picture of this moment."""
        return self.machine.view(self.clock())

    async def drain(self, timeout: float) -> bool:
        """Take nothing new and wait until all is done; after ``timeout`` seconds what is left fails with ``Draining``. True: all done."""
        self._feed(events.Drain())
        if self._is_idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout)
        except (asyncio.TimeoutError, TimeoutError):
            self._feed(events.Abort("The server is shutting down; the answer was cut off."))
            return False
        return True

    def close(self) -> None:
        """Fail what is left and stop the engine. Idempotent."""
        if self._is_closed:
            return
        self._feed(events.Abort("The server is shutting down; the answer was cut off."))
        self._is_closed = True
        for timer in (self._wake, self._idle_check):
            if timer is not None:
                timer.cancel()
        self.engine.close()

    # ---- events in

    def _from_engine(self, event: EngineEvent) -> None:
        """Called by engine threads."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._engine_reports, event)
        except RuntimeError:
            log.debug("engine event after the loop was closed: %s", type(event).__name__)

    def _engine_reports(self, event: EngineEvent) -> None:
        if self._is_closed:
            return
        try:
            self._feed(event)
        except Exception as error:  # a bug in machine or engine: fail everybody loudly rather than hang them
            log.exception("the slot machine could not take %s", type(event).__name__)
            self._feed(EngineFailed(f"internal error: {error}"))

    def _feed(self, event: Event) -> None:
        if not self._is_closed:
            self._obey(self.machine.receive(event, self.clock()))

    # ---- commands out

    def _obey(self, commands: list[Command]) -> None:
        self._commands.extend(commands)
        if self._is_draining_commands:
            return
        self._is_draining_commands = True
        try:
            while self._commands:
                self._carry_out(self._commands.popleft())
        finally:
            self._is_draining_commands = False
        self._plan()

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Window):
            self.engine.submit(command)
        elif isinstance(command, PageCopy):
            self.engine.copy(command)
        elif isinstance(command, Trace):
            if self.trace is not None:
                self.trace(command)
        elif isinstance(command, (Finished, Failed, Cancelled)):
            self._deliver(self._streams.pop(command.request_id), command)
        else:
            self._deliver(self._streams[command.request_id], command)

    def _deliver(self, deliver: Deliver, event: RequestEvent) -> None:
        try:
            deliver(event)
        except Exception:  # one stream's bug must not take the others with it
            log.exception("a stream could not take its %s", type(event).__name__)
            self._obey(self.machine.receive(events.Cancel(event.request_id), self.clock()))

    # ---- timers

    def _plan(self) -> None:
        """Set the timers that follow from the machine's state: the next deadline, and the check when idle."""
        if self._loop is None:
            return
        self._set_wake(self._loop)
        if not self.machine.is_idle:
            self._is_idle.clear()
        elif not self._is_idle.is_set():
            self._is_idle.set()
            if self._idle_check is not None:
                self._idle_check.cancel()
            self._idle_check = self._loop.call_later(IDLE_CHECK_S, self._check_idle)

    def _set_wake(self, loop: asyncio.AbstractEventLoop) -> None:
        due = self.machine.wake_at()
        due = math.inf if due is None else due
        if self.host_free is not None and not self.machine.is_idle:
            due = min(due, self._looked_at + HOST_LOOK_S)
        if due == self._due:
            return
        if self._wake is not None:
            self._wake.cancel()
        self._due = due
        self._wake = loop.call_later(max(0.0, due - self.clock()), self._tick) if due < math.inf else None

    def _tick(self) -> None:
        self._wake, self._due = None, math.inf
        self._looked_at = self.clock()
        self._feed(events.Tick(self.host_free() if self.host_free is not None else None))

    def _check_idle(self) -> None:
        """Idle: look at the memory and at the books. A fault is a bug; it is logged, and the server goes on."""
        if not self.machine.is_idle or self._is_closed:
            return
        self._tick()
        try:
            self.machine.check_integrity()
        except AssertionError:
            log.exception("the slot machine's books do not balance")
