"""Thousands of small requests leave nothing behind: memory, threads, tasks, open files, and the machine's books.

The pool is small, so histories come and go all the time; after the warm-up everything that is kept has reached its size.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.serving import Address, Served, serving, some_tokens

AT_ONCE = 6
ROUNDS = 4
nightly = pytest.mark.skipif("STRATA_NIGHTLY" not in os.environ, reason="nightly: set STRATA_NIGHTLY=1")


@dataclass(frozen=True)
class Kept:
    """What the process holds. ``rss``: bytes in memory, 0 where the system does not tell."""

    traced: int
    rss: int
    threads: int
    tasks: int
    files: int


def kept() -> Kept:
    gc.collect()
    files = Path("/proc/self/fd")
    status = Path("/proc/self/statm")
    return Kept(
        tracemalloc.get_traced_memory()[0], int(status.read_text().split()[1]) * 4096 if status.is_file() else 0,
        threading.active_count(), len(asyncio.all_tasks()), len(list(files.iterdir())) if files.is_dir() else 0,
    )


async def rest(served: Served) -> Kept:
    """What is kept when everybody has gone."""
    while (view := served.view()).running or view.waiting or view.windows_in_flight:
        await asked(served.url, lambda client: client.get("/health"))
    return kept()


async def asked(url: str, what: Callable[[Address], Awaitable[object]]) -> None:
    """Something asked by a client that leaves nothing of its own behind."""
    with Address(url) as client:
        await what(client)


async def ask(served: Address, number: int) -> None:
    """Whole answers, streams, seeded ones, clients that leave, requests that are refused, next turns: in turn."""
    prompt = some_tokens(3 + number % 40, number % 97)
    if number % 10 == 3:
        stream = await served.stream(prompt, 20)
        await stream.until(2)
        stream.leave()
    elif number % 10 == 7:
        call = await served.call("POST", "/v1/completions", {"prompt": "", "max_tokens": 1})
        assert call.status == 400
        await call.read()
    elif number % 2:
        await (await served.stream(prompt, 3, temperature=1, seed=number)).finish()
    else:
        result = await served.complete(prompt, 3)
        await served.complete([*prompt, *result.tokens, 5], 2)


async def crowd(served: Served, numbers: range) -> None:
    todo = iter(numbers)

    async def client() -> None:
        for number in todo:
            await asked(served.url, lambda client, number=number: ask(client, number))

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))


@pytest.mark.parametrize("requests", [50, pytest.param(1000, marks=nightly)])
def test_nothing_grows(requests: int) -> None:
    """In a loop of its own: thousands of requests take longer than a test in the loop of the others may."""
    asyncio.run(soak(requests))


async def soak(requests: int) -> None:
    """Rounds of as many requests. What leaks grows in every round; a cache or a buffer that finds its size late does not."""
    # Host memory for parked conversations fills up first, which is no leak; only a long warm-up sees it full.
    cache = 1 if requests >= 1000 else 0
    async with serving(layer_split=(2,), batch=4, kv_memory_mib=1, conversation_cache_mib=cache, context=128, queue_size=64) as served:
        tracemalloc.start()
        try:
            await crowd(served, range(requests))
            before = await rest(served)
            for number in range(1, ROUNDS + 1):
                await crowd(served, range(number * requests, (number + 1) * requests))
                after = await rest(served)
                grown = growth(before, after, requests)
                if not grown:
                    break
                before = after
        finally:
            tracemalloc.stop()
        served.manager.machine.check_integrity()
        assert served.view().pages_busy == 0
    assert not grown, grown


def growth(before: Kept, after: Kept, requests: int) -> str:
    """What has grown over some requests; empty if nothing has."""
    per_request = (after.traced - before.traced) / requests
    if per_request >= 300:
        return f"{per_request:.0f} bytes of each request stay"
    if after.rss - before.rss >= 8 << 20:
        return f"{(after.rss - before.rss) >> 20} MiB of memory stay"
    same = (after.threads, after.tasks, after.files) == (before.threads, before.tasks, before.files)
    return "" if same else f"threads, tasks or files stay: {before}, {after}"
