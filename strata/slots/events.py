"""What goes into the slot machine and what comes out.

In: the events below, and the engine's own (``WindowDone``, ``CopyDone``, ``EngineFailed``). Out: commands, which are the shared nouns
themselves: a ``Window`` to run, a ``PageCopy`` to start, a ``RequestEvent`` to deliver, or a ``Trace`` for whoever keeps traces. Commands
are carried out in the order given.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.messages import EngineEvent, PageCopy, RequestEvent, Window
from strata.request import Request


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request came. ``packed`` may hold ``pack(request.prompt)``, made off the loop thread where the prompt was tokenised.

    Refused by raising ``QueueFull``, ``Draining``, ``EngineDead``, ``ContextExceeded``, ``ClientError``: then nothing was admitted.
    """

    request: Request
    packed: bytes = b""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client left, or the server gave up on it. Ignored where the request has ended already."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The text layer found a stop string: finish now with reason ``stop``. Ignored where the request has ended already."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed (deadlines). ``host_free``: bytes of host memory that are free, where somebody has looked."""

    host_free: int | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """Take nothing new; finish what was admitted."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Fail everything that was admitted, now, with ``Draining(message)``."""

    message: str


@dataclass(frozen=True, slots=True)
class Trace:
    """What a replay needs to know of a seated request that has ended: ids, times and counts, never a token.

    ``conversation`` began with the first ``shared`` tokens of conversation ``parent`` (itself, where it was continued; 0 for none) as
    that was then. ``arrived``: seconds of the machine's clock.
    """

    request_id: str
    arrived: float
    conversation: int
    parent: int
    shared: int
    prompt: int
    cached: int
    generated: int
    slot: int


class IllegalEvent(Exception):
    """An event that cannot happen now (an unknown window, a request id in use). Raised before anything was changed: a bug elsewhere."""


Event = Arrive | Cancel | Stop | Tick | Drain | Abort | EngineEvent
Command = Window | PageCopy | RequestEvent | Trace
