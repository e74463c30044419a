"""What the routes are given to serve: the model's parts, and the state of the server around them.

The app builds a ``Site`` first, so that ``/health`` and ``/ready`` answer while the model loads, and sets its ``service`` when
the model is there. Nothing else here changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from strata import __version__
from strata.config.settings import TABLE, Settings
from strata.errors import Draining, EngineDead, Loading, Unavailable
from strata.messages import RequestEvent
from strata.request import Request
from strata.metric_table import CONFIG_LABELS
from strata.metrics import Metrics
from strata.server.guard import Guard
from strata.server.host import memory_bytes
from strata.text.template import ChatTemplate
from strata.text.tokenizer import Tokenizer

T = TypeVar("T")


class Manager(Protocol):
    """What the server needs of the slot manager. All on the loop thread; no call blocks.

    ``deliver`` gets each of a request's events, the last one a terminal event, exactly one, whatever happens.
    """

    def submit(self, request: Request, deliver: Callable[[RequestEvent], None], packed: bytes) -> None:
        """``packed``: ``strata.slots.pack(request.prompt)``. Raises ``QueueFull``, ``Draining``, ``EngineDead`` or
        ``ClientError``; then ``deliver`` is never called."""

    def cancel(self, request_id: str) -> None:
        """The client has left. Unknown ids are ignored."""

    def stop(self, request_id: str) -> None:
        """Finish now, as by a stop token. Unknown ids are ignored."""

    def view(self) -> Any:
        """A frozen picture: ``strata.slots.view.MachineView``, read attribute by attribute here."""


class Hardware(Protocol):
    """The devices: ``refresh`` asks them, ``view`` gives a ``strata.hardware.DeviceView`` for each."""

    async def refresh(self) -> None: ...

    def view(self) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class Model:
    """Facts for people and clients. ``created``: Unix seconds. ``context``: tokens of one request. ``file``: its name, no path."""

    name: str
    context: int
    vocab_size: int
    created: int = 0
    aliases: tuple[str, ...] = ()
    trained_context: int = 0
    architecture: str = ""
    parameters: int = 0
    file: str = ""
    file_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Service:
    """A loaded model. ``template`` None, like one without sources: chat is refused."""

    model: Model
    manager: Manager
    tokenizer: Tokenizer
    template: ChatTemplate | None


@dataclass(frozen=True, slots=True)
class ServerView:
    """What /metrics says of the server beside the slots. ``memory``: bytes by kind, empty where the system does not say;
    ``config``: label values by label name."""

    is_ready: bool
    connections: int
    queue_limit: int
    memory: Mapping[str, float]
    config: Mapping[str, str]


@dataclass(slots=True)
class Site:
    """The server as the routes see it. ``executor`` runs what is too long for the loop thread: tokenising, templates, big JSON.

    ``clock``: monotonic seconds for everything that is measured; not the loop's, which counts whole milliseconds in uvloop.
    """

    settings: Settings
    metrics: Metrics
    executor: Executor
    guard: Guard
    service: Service | None = None
    hardware: Hardware | None = None
    is_draining: bool = False
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)
    connections: Callable[[], int] = field(init=False, default=lambda: 0)

    def __post_init__(self) -> None:
        self.started = self.clock()
        self.metrics.server = self.view

    @property
    def fingerprint(self) -> str:
        """OpenAI's ``system_fingerprint``: which program made the answer."""
        return f"strata-{__version__}"

    def loaded(self) -> Service:
        """Raises ``Loading``."""
        if self.service is None:
            raise Loading("the model is still loading")
        return self.service

    def working(self) -> Service:
        """The service, for something new. Raises ``Loading`` or ``Draining``."""
        if self.is_draining:
            raise Draining("the server is shutting down")
        return self.loaded()

    def check_engine(self) -> None:
        """Raises ``EngineDead``."""
        if self.service is not None and self.service.manager.view().dead:
            raise EngineDead("the engine has stopped: restart the server")

    def check_ready(self) -> None:
        """Raises ``Loading``, ``Draining`` or ``EngineDead`` where new work would be refused."""
        self.working()
        self.check_engine()

    def view(self) -> ServerView:
        settings = self.settings
        try:
            self.check_ready()
            is_ready = True
        except Unavailable:
            is_ready = False
        config = {row.name: row.show(getattr(settings, row.name)) for row in TABLE if row.name in CONFIG_LABELS}
        config["context"] = str(self.service.model.context) if self.service is not None else ""
        return ServerView(is_ready, self.connections(), settings.queue_size, memory_bytes(), config)

    async def off_loop(self, function: Callable[..., T], *arguments: object) -> T:
        """Run ``function`` on a worker thread; the loop goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)
