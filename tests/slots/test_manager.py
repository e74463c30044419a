"""The asyncio shell: events in from threads, commands out in order, streams that misbehave, timers, drain."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from strata.errors import Draining, EngineDead, QueueFull
from strata.messages import (
    Cancelled, EngineEvent, EngineFacts, EngineFailed, Failed, Finished, NewTokens, PageCopy, RequestEvent, Window,
)
from strata.request import Request, Sampling
from strata.slots import SlotMachine, SlotManager, SlotPolicy
from tests.clock import JumpClock
from tests.slots.fake_engine import FakeEngine, expected, facts


class ThreadedEngine:
    """The fake engine on a thread of its own; ``gate`` closed holds it back."""

    def __init__(self, plain: EngineFacts) -> None:
        self.facts = plain
        self.fake = FakeEngine(plain)
        self.gate = threading.Event()
        self.gate.set()
        self._work = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self, deliver: Callable[[EngineEvent], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(deliver,), daemon=True)
        self._thread.start()

    def submit(self, window: Window) -> None:
        with self._work:
            self.fake.take(window)
            self._work.notify()

    def copy(self, copy: PageCopy) -> None:
        with self._work:
            self.fake.take(copy)
            self._work.notify()

    def close(self) -> None:
        with self._work:
            self._is_closed = True
            self._work.notify()
        self.gate.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, deliver: Callable[[EngineEvent], None]) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._is_closed or not self.fake.is_idle)
                if self._is_closed:
                    return
                event = self.fake.land()
            self.gate.wait()
            deliver(event)


class Client:
    """Collects one request's events."""

    def __init__(self) -> None:
        self.events: list[RequestEvent] = []
        self.done = asyncio.Event()
        self.first = asyncio.Event()

    def __call__(self, event: RequestEvent) -> None:
        self.events.append(event)
        if isinstance(event, NewTokens):
            self.first.set()
        if isinstance(event, (Finished, Failed, Cancelled)):
            self.done.set()

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, NewTokens) for token in event.tokens]


class Shell:
    """A manager that is started and closed with the test."""

    def __init__(self, policy: SlotPolicy | None = None, clock: Callable[[], float] | None = None, **changes: object) -> None:
        self.engine = ThreadedEngine(facts(**changes))
        machine = SlotMachine(self.engine.facts, policy or SlotPolicy(slots=4))
        self.manager = SlotManager(machine, self.engine, clock or asyncio.get_running_loop().time)

    async def __aenter__(self) -> Shell:
        self.manager.start(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.manager.close()

    def ask(self, name: str, prompt: tuple[int, ...], max_tokens: int = 20) -> Client:
        client = Client()
        self.manager.submit(Request(name, prompt, max_tokens, Sampling()), client)
        return client


async def test_clients_get_their_own_tokens_and_one_end() -> None:
    async with Shell() as shell:
        clients = {number: shell.ask(str(number), (number, 1, 2, 3, 4)) for number in range(9)}
        await asyncio.gather(*(client.done.wait() for client in clients.values()))
        for number, client in clients.items():
            assert client.tokens == expected(Request("", (number, 1, 2, 3, 4), 20), 20)
            assert sum(isinstance(event, (Finished, Failed, Cancelled)) for event in client.events) == 1
            assert isinstance(client.events[-1], Finished)


async def test_a_cancel_and_a_stop_from_inside_deliver() -> None:
    async with Shell() as shell:
        seen: list[RequestEvent] = []
        done = asyncio.Event()

        def deliver(event: RequestEvent) -> None:
            seen.append(event)
            if isinstance(event, NewTokens):
                shell.manager.stop("a")
            elif isinstance(event, Finished):
                done.set()

        shell.manager.submit(Request("a", (1, 2, 3), 20, Sampling()), deliver)
        await done.wait()
        assert isinstance(seen[-1], Finished) and seen[-1].reason == "stop"
        assert sum(isinstance(event, NewTokens) for event in seen) == 1


async def test_a_stream_that_raises_is_cancelled_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async with Shell() as shell:
        def broken(event: RequestEvent) -> None:
            raise ZeroDivisionError

        with caplog.at_level(logging.ERROR):
            shell.manager.submit(Request("broken", (1, 2, 3), 20, Sampling()), broken)
            client = shell.ask("fine", (4, 5, 6))
            await client.done.wait()
        assert isinstance(client.events[-1], Finished)
        assert "a stream could not take its" in caplog.text
        assert shell.manager.view().counters.ended["cancelled"] == 1


async def test_a_refusal_delivers_nothing() -> None:
    async with Shell(SlotPolicy(slots=1, queue_limit=0)) as shell:
        shell.engine.gate.clear()
        first = shell.ask("a", (1, 2, 3))
        client = Client()
        with pytest.raises(QueueFull):
            shell.manager.submit(Request("b", (1, 2, 3), 5, Sampling()), client)
        assert client.events == []
        shell.engine.gate.set()
        await first.done.wait()


async def test_a_deadline_passes_without_any_other_event(jump_clock: JumpClock) -> None:
    async with Shell(SlotPolicy(slots=1, queue_timeout=5.0)) as shell:
        shell.engine.gate.clear()
        shell.ask("a", (1, 2, 3))
        client = shell.ask("b", (1, 2, 3))
        await client.done.wait()
        terminal = client.events[-1]
        assert isinstance(terminal, Failed) and isinstance(terminal.error, QueueFull)
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)


async def test_a_drain_waits_for_what_runs() -> None:
    async with Shell() as shell:
        clients = [shell.ask(str(number), (number, 2, 3)) for number in range(6)]
        assert await shell.manager.drain(30.0)
        assert all(isinstance(client.events[-1], Finished) for client in clients)
        with pytest.raises(Draining):
            shell.ask("late", (1,))


async def test_a_drain_that_takes_too_long_cuts_off(jump_clock: JumpClock) -> None:
    async with Shell() as shell:
        shell.engine.gate.clear()
        client = shell.ask("a", (1, 2, 3))
        assert not await shell.manager.drain(2.0)
        terminal = client.events[-1]
        assert isinstance(terminal, Failed) and isinstance(terminal.error, Draining)


async def test_drain_of_an_idle_server_returns_at_once() -> None:
    async with Shell() as shell:
        assert await shell.manager.drain(0.0)


async def test_closing_ends_every_stream_and_can_be_repeated() -> None:
    shell = Shell()
    async with shell:
        shell.engine.gate.clear()
        client = shell.ask("a", (1, 2, 3))
    assert isinstance(client.events[-1], Failed)
    shell.manager.close()
    with pytest.raises(EngineDead):
        shell.ask("b", (1,))


async def test_an_event_that_cannot_be_taken_fails_everybody_rather_than_hang_them(caplog: pytest.LogCaptureFixture) -> None:
    async with Shell() as shell:
        shell.engine.gate.clear()
        client = shell.ask("a", (1, 2, 3))
        with caplog.at_level(logging.CRITICAL):
            shell.manager._from_engine(EngineFailed("nonsense", (99,)))
            await client.done.wait()
        terminal = client.events[-1]
        assert isinstance(terminal, Failed) and isinstance(terminal.error, EngineDead)
        assert shell.manager.machine.dead.startswith("internal error")


async def test_the_books_are_checked_when_nothing_happens(jump_clock: JumpClock, caplog: pytest.LogCaptureFixture) -> None:
    async with Shell() as shell:
        client = shell.ask("a", (1, 2, 3))
        await client.done.wait()
        while not shell.manager.machine.is_idle:
            await asyncio.sleep(0)
        shell.manager.machine.memory.pages.refs[0] += 1
        with caplog.at_level(logging.ERROR):
            await asyncio.sleep(3.0)
        assert "books do not balance" in caplog.text


async def test_free_host_memory_reaches_the_machine(jump_clock: JumpClock) -> None:
    engine = ThreadedEngine(facts())
    manager = SlotManager(SlotMachine(engine.facts, SlotPolicy(slots=1)), engine, asyncio.get_running_loop().time, lambda: 12345)
    manager.start(asyncio.get_running_loop())
    client = Client()
    manager.submit(Request("a", (1, 2, 3), 3, Sampling()), client)
    await client.done.wait()
    await asyncio.sleep(20.0)
    assert manager.machine.memory.host.free == 12345
    manager.close()
