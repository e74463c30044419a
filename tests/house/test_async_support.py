"""The suite's own async runner and clock (tests/conftest.py, tests/clock.py)."""

from __future__ import annotations

import asyncio
import threading
import time

import hypothesis
import pytest
from hypothesis import strategies

from tests.clock import JumpClock
from tests.conftest import run_async

ran: list[str] = []


async def test_async_tests_run() -> None:
    await asyncio.sleep(0)
    ran.append("async")


def test_the_async_test_really_ran() -> None:
    assert ran == ["async"]


async def test_an_hour_takes_no_time(jump_clock: JumpClock) -> None:
    loop = asyncio.get_running_loop()
    began = time.monotonic()
    await asyncio.sleep(3600)
    assert loop.time() == jump_clock.now == 3600
    assert time.monotonic() - began < 60


async def test_timers_fire_in_order_and_at_their_time(jump_clock: JumpClock) -> None:
    seen: list[tuple[str, float]] = []

    async def note(name: str, delay: float) -> None:
        await asyncio.sleep(delay)
        seen.append((name, jump_clock.now))

    await asyncio.gather(note("late", 5), note("soon", 1), note("middle", 2.5))
    assert seen == [("soon", 1), ("middle", 2.5), ("late", 5)]


async def test_a_thread_can_wake_the_jumping_loop(jump_clock: JumpClock) -> None:
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(woken.set))
    thread.start()
    await woken.wait()
    thread.join()
    assert jump_clock.now == 0


def test_a_wait_for_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_for_nothing() -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr("tests.clock.DEADLOCK_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="nothing will do"):
        run_async(wait_for_nothing, JumpClock())


examples: list[int] = []


@hypothesis.given(number=strategies.integers())
async def test_hypothesis_gives_to_async_tests(number: int) -> None:
    await asyncio.sleep(0)
    examples.append(number)


def test_hypothesis_really_gave() -> None:
    assert len(set(examples)) > 10
