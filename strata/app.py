"""The composition root: builds every part from the settings, joins them, runs and drains them.

A host program writes ``async with Server(settings) as server:`` inside its own loop; no signal handler is touched there. ``run``
is the same for a process of our own: a log, a progress bar, signals. The port is opened before the model is loaded, so that a
busy port is told at once and ``/health`` and ``/ready`` answer meanwhile.

Shutdown in this order: new work is refused, running requests get ``drain_timeout_s``, streams that are left end with an error,
the engine's threads stop, the model file is closed. A second signal skips the waiting.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

from strata import __version__
from strata.config import Settings, check
from strata.console import Progress, escape, setup_logging
from strata.engine.resources import free_memory
from strata.errors import StartError
from strata.hardware import Hardware
from strata.messages import EngineFacts
from strata.metrics import Metrics
from strata.model import LoadedModel, describe_model, load_model
from strata.server.guard import Guard, check_exposure, read_keys
from strata.server.limits import Limits
from strata.server.listener import Listener
from strata.server.routes import Routes
from strata.server.service import Service, Site
from strata.slots import SlotMachine, SlotManager, SlotPolicy
from strata.tracefile import TraceFile

log = logging.getLogger("strata")


class Server:
    """One server: ``start``/``stop``, or ``async with``. ``progress(done, total)`` is called with bytes while the weights load.

    Raises ``StartError`` (SettingError, ModelError) when it cannot start; then nothing is left running.
    """

    def __init__(self, settings: Settings, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        check(settings)
        self.settings = settings
        self._progress = progress
        self._executor = ThreadPoolExecutor(2, "strata-text")
        self._site: Site | None = None
        self._listener: Listener | None = None
        self._manager: SlotManager | None = None
        self._traces: TraceFile | None = None
        self._model: LoadedModel | None = None
        self._is_stopped = False
        self._handover = threading.Lock()

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """Where it listens, e.g. ``http://127.0.0.1:8080``."""
        assert self._listener is not None, "not started"
        host, port = self._listener.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Listen, load the model, serve. Returns when ready."""
        try:
            await self._listen()
            await self._load()
        except BaseException:
            await self.stop(0)
            raise

    async def stop(self, seconds: float | None = None) -> None:
        """Drain for ``seconds`` (default: the setting) and end. May be called again, e.g. with 0 to cut a drain short."""
        with self._handover:
            self._is_stopped = True
        if self._site is not None:
            self._site.is_draining = True
        if self._listener is not None:
            await self._listener.drain(self.settings.drain_timeout_s if seconds is None else seconds)
            await self._listener.close()
        if self._manager is not None:
            await self._manager.drain(0)
        if self._model is not None:
            # Off the loop, which may be a host program's: the engine's threads end with the window they are in.
            await asyncio.get_running_loop().run_in_executor(None, self._model.engine.close)
        if self._manager is not None:
            self._manager.close()
        if self._model is not None:
            self._model.close()
        if self._traces is not None:
            self._traces.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _listen(self) -> None:
        settings = self.settings
        keys = read_keys(settings)
        check_exposure(settings, keys)
        name = settings.model_name or Path(str(settings.model)).stem
        self._traces = TraceFile(settings.slot_trace) if settings.slot_trace else None
        self._site = Site(settings, Metrics(name, __version__), self._executor, Guard(settings, keys))
        self._listener = Listener(Routes(self._site), Limits.of(settings))
        await self._listener.start(settings.host, settings.port)

    async def _load(self) -> None:
        assert self._site is not None
        loop = asyncio.get_running_loop()
        begin = time.monotonic()
        await loop.run_in_executor(None, self._load_model)
        if self._model is None or self._is_stopped:
            raise StartError("stopped while the model was loading")
        engine = self._model.engine
        machine = SlotMachine(engine.facts, slot_policy(self.settings, engine.facts, free_memory() or 0))
        if engine.facts.num_stages > machine.num_groups:
            log.info(idle_stages(engine.facts.num_stages, machine.num_groups, self.settings.batch))
        trace = self._traces.write if self._traces is not None else None
        self._manager = SlotManager(machine, engine, time.monotonic, lambda: free_memory() or 0, trace)
        self._manager.start(loop)
        self._site.metrics.view = self._manager.view
        self._site.metrics.engine = lambda: engine.times
        self._site.hardware = hardware = Hardware(engine.memory)
        self._site.metrics.devices = hardware.view
        self._site.service = Service(self._model.facts, self._manager, self._model.tokenizer, self._model.template)
        log.info("ready in %.1f s: %s on %s", time.monotonic() - begin, self._model.facts.name, self.url)

    def _load_model(self) -> None:
        """On a thread that nobody can end: what it brings to a server that was stopped meanwhile, it closes itself."""
        model = load_model(self.settings, self._report)
        with self._handover:
            if not self._is_stopped:
                self._model = model
                return
        model.close()

    def _report(self, done: int, total: int) -> None:
        """Progress of the loading thread; ends it when the server was stopped."""
        if self._is_stopped:
            raise StartError("stopped while the model was loading")
        self._progress(done, total)


CACHE_SHARE = 4
"""Of the host memory that is free once the model is loaded, conversations get one part in so many, if nothing else is said."""


def slot_policy(settings: Settings, facts: EngineFacts, free: int) -> SlotPolicy:
    """The slot machine's part of the settings. ``free``: bytes of host memory."""
    cache = settings.conversation_cache_mib
    return SlotPolicy(
        slots=settings.batch,
        groups=settings.batch_groups or 0,
        rows=cast(Literal["compact", "prefix"], settings.rows),
        chunk=facts.chunk,
        decode_share=settings.batch_decode_share,
        queue_limit=settings.queue_size,
        queue_timeout=settings.queue_timeout_s,
        low_first=settings.slot_low_first,
        expire_s=settings.slot_expire_s,
        shelf=settings.shelf,
        cache_bytes=free // CACHE_SHARE if cache is None else cache << 20,
    )


def idle_stages(stages: int, groups: int, slots: int) -> str:
    """Why some stage must wait while slots decode."""
    return (
        f"{slots} slots in {groups} {'group' if groups == 1 else 'groups'} on {stages} stages: while slots decode, at most {groups} "
        f"{'works' if groups == 1 else 'work'} at a time; a multiple of {stages} slots and --batch-groups auto keep all at work"
    )


# ---------------------------------------------------------------- a process of our own


def run(settings: Settings) -> int:
    """Serve until a signal comes. Returns the exit status: 0 after a clean end, 1 when the server could not start."""
    setup_logging(settings.log_level, settings.log_format)
    try:
        _run_loop(_serve(settings))
    except StartError as error:
        print(f"error: {escape(str(error))}", file=sys.stderr)
        return 1
    return 0


def check_only(settings: Settings) -> int:
    """For ``--check``: print what would be served and its memory, or why it cannot be. Returns the exit status."""
    try:
        check_exposure(settings, read_keys(settings))
        print(describe_model(settings))
    except StartError as error:
        print(f"error: {escape(str(error))}", file=sys.stderr)
        return 1
    return 0


def _run_loop(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:  # Windows has none, and the server does not need it
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _serve(settings: Settings) -> None:
    signals, server = Signals(), Server(settings, Progress("loading the model"))
    signalled = asyncio.ensure_future(signals.wait())
    starting = asyncio.ensure_future(server.start())
    await asyncio.wait({starting, signalled}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        await starting
        await signalled
        log.info("stopping; requests under way have %g s, a second signal ends them now", settings.drain_timeout_s)
    starting.cancel()
    await asyncio.wait({starting})
    stopping = asyncio.ensure_future(server.stop())
    again = asyncio.ensure_future(signals.wait())
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        await server.stop(0)
    await stopping
    again.cancel()
    signals.ignore()
    log.info("stopped")


class Signals:
    """SIGINT and SIGTERM (on Windows SIGINT and SIGBREAK), one at a time; ``wait`` returns for each."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[int] = asyncio.Queue()
        self._loop = loop = asyncio.get_running_loop()
        self._numbers = (signal.SIGINT, getattr(signal, "SIGBREAK", signal.SIGTERM))
        for number in self._numbers:
            try:
                loop.add_signal_handler(number, self._arrived.put_nowait, number)
            except NotImplementedError:  # the loops of Windows
                signal.signal(number, lambda which, _: loop.call_soon_threadsafe(self._arrived.put_nowait, which) and None)

    async def wait(self) -> None:
        await self._arrived.get()

    def ignore(self) -> None:
        """For the last moments of the process: one signal too many must not turn a clean end into another exit status."""
        for number in self._numbers:
            with suppress(NotImplementedError):
                self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
