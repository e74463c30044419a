"""A whole server in memory: real routes, slot manager, tokenizer; a scripted engine; connections without sockets.

``World`` builds it, ``world.connect()`` gives a ``Client`` whose bytes go straight into a ``Connection`` and whose answers are
parsed by h11's client side: what the tests compare with is an HTTP implementation that is not the server's own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import h11

from strata.config.settings import Settings
from strata.engine.stage import StageTimes
from strata.hardware import DeviceView
from strata.metrics import Metrics
from strata.server.connection import Connection
from strata.server.guard import Guard, read_keys
from strata.server.limits import Limits
from strata.server.routes import Routes
from strata.server.service import Model, Service, Site
from strata.slots.machine import SlotMachine
from strata.slots.manager import SlotManager
from strata.slots.policy import SlotPolicy
from strata.text.template import ChatTemplate
from strata.text.tokenizer import Tokenizer
from strata.weights.gguf import GGUFFile
from tests.server.engine import ScriptedEngine, says
from tests.server.transport import MemoryTransport

TINY = Path(__file__).parent.parent / "data" / "tiny" / "llama-iq3s.gguf"
CONTEXT = 256
END = 2
# Chat as plain text, one line a message: a test can write the prompt down.
TEMPLATE = ChatTemplate({"default": """
{%- for tool in tools or [] %}tool {{ tool.function.name }}
{% endfor %}
{%- if reasoning_effort is defined %}effort {{ reasoning_effort }}
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}"""})


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    file = GGUFFile.open(TINY)
    try:
        return Tokenizer.from_metadata(file.metadata)
    finally:
        file.close()


def tokens(text: str) -> list[int]:
    """One token for each byte, but where the vocabulary has ``ab`` and ``cd``."""
    return tokenizer().encode(text, add_special=False, parse_special=False)


class InlineExecutor(Executor):
    """Runs at once on the loop's thread, so that the jump clock cannot jump over it."""

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future


class Owner:
    """Counts connections, and has room for all."""

    def __init__(self) -> None:
        self.open = 0

    def opened(self, connection: Connection, address: str) -> bool:
        self.open += 1
        return True

    def closed(self, connection: Connection, address: str) -> None:
        self.open -= 1


class FixedHardware:
    """One device that has an answer to everything."""

    async def refresh(self) -> None:
        """It never changes."""

    def view(self) -> Sequence[DeviceView]:
        return (DeviceView("0", 700, 500, 300, 2400, 900, 0.5, 61.0, 250.0),)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events; the last must be [DONE]."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        data = [line.removeprefix("data: ") for line in lines if not line.startswith(":")]
        assert data[-1] == "[DONE]"
        return [json.loads(each) for each in data[:-1]]


class Client:
    """One connection's other end."""

    def __init__(self, world: World, address: str) -> None:
        self.transport = MemoryTransport(address)
        self.connection = Connection(world.routes, world.owner, world.limits)
        self.transport.protocol = self.connection
        self._parsed = 0
        self._h11 = h11.Connection(h11.CLIENT)
        self.connection.connection_made(self.transport)

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def leave(self) -> None:
        """Close, as a client's socket does it."""
        if not self.connection.eof_received():
            self.transport.close()

    async def request(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One exchange; ``body`` bytes, or an object that becomes JSON. ``x_name`` is the header X-Name."""
        await self.start(method, path, body, **headers)
        return await self.answer()

    async def start(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        if self._h11.our_state is h11.DONE:
            self._h11.start_next_cycle()
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = [("Host", "127.0.0.1"), *((name.replace("_", "-"), value) for name, value in headers.items())]
        if body is not None:
            lines.append(("Content-Length", str(len(data))))
        out = self._h11.send(h11.Request(method=method, target=path, headers=lines)) or b""
        if data:
            out += self._h11.send(h11.Data(data=data)) or b""
        self.send(out + (self._h11.send(h11.EndOfMessage()) or b""))

    async def answer(self) -> Answer:
        """The next answer, when it is whole."""
        head, body = None, bytearray()
        while True:
            event = await self.event()
            if isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                headers = {name.decode(): value.decode() for name, value in head.headers}
                return Answer(head.status_code, headers, bytes(body))
            elif isinstance(event, h11.ConnectionClosed):
                raise AssertionError("closed without a whole answer")

    async def event(self) -> Any:
        """h11's next event of this side."""
        while True:
            event = self._h11.next_event()
            if event is not h11.NEED_DATA:
                return event
            while self._parsed == len(self.transport.sent) and not self.transport.is_closed:
                self.transport.news.clear()
                await self.transport.news.wait()
            data = bytes(self.transport.sent[self._parsed:])
            self._parsed += len(data)
            self._h11.receive_data(data)

    async def until_sent(self, text: bytes) -> None:
        """Wait until the server has written ``text``."""
        while text not in self.transport.sent:
            assert not self.transport.is_closed, "closed before it was written"
            self.transport.news.clear()
            await self.transport.news.wait()

    async def until_closed(self) -> None:
        while not self.transport.is_closed:
            self.transport.news.clear()
            await self.transport.news.wait()


@dataclass
class World:
    """Build it inside a running loop. ``loaded`` False: the model is still loading."""

    settings: Settings = field(default_factory=lambda: Settings(batch=4))
    engine: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(says(tokens("hello world"), END), CONTEXT))
    policy: SlotPolicy = field(default_factory=lambda: SlotPolicy(slots=4))
    limits: Limits = field(default_factory=Limits)
    loaded: bool = True

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.metrics = Metrics("tiny")
        self.owner = Owner()
        self.machine = SlotMachine(self.engine.facts, self.policy)
        self.manager = SlotManager(self.machine, self.engine, loop.time)
        self.manager.start(loop)
        self.site = Site(self.settings, self.metrics, InlineExecutor(), Guard(self.settings, read_keys(self.settings)), clock=loop.time)
        self.routes = Routes(self.site)
        if self.loaded:
            self.load()

    def load(self) -> None:
        model = Model("tiny", self.engine.facts.context, tokenizer().vocab_size, created=7, file="tiny.gguf")
        self.site.service = Service(model, self.manager, tokenizer(), TEMPLATE)
        self.metrics.view = self.manager.view
        self.metrics.engine = lambda: (StageTimes("stage 0", 1.5, 0.5, 3),)
        self.site.hardware = FixedHardware()
        self.metrics.devices = self.site.hardware.view

    def connect(self, address: str = "127.0.0.1") -> Client:
        return Client(self, address)

    async def post(self, path: str, body: Any, **headers: str) -> Answer:
        return await self.connect().request("POST", path, body, **headers)

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.connect().request("GET", path, **headers)


async def settle(turns: int = 20) -> None:
    """Let everything that is ready run."""
    for _ in range(turns):
        await asyncio.sleep(0)


__all__ = ["CONTEXT", "END", "TEMPLATE", "Answer", "Client", "ScriptedEngine", "World", "says", "settle", "tokens"]
