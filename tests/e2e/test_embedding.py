"""A server inside a host program's loop: it leaves signals alone, and nothing of itself behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from strata.app import Server
from strata.config import Settings
from strata.errors import ModelError, StartError
from tests.e2e.serving import COMPLETIONS, TINY, Address, Served, completion, serving, some_tokens

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DESCRIPTORS, MAPS = Path("/proc/self/fd"), Path("/proc/self/maps")


def own_threads(others: Collection[threading.Thread] = ()) -> set[threading.Thread]:
    """Threads but ``others`` that the server has started and that should be gone; they get a moment to end."""
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("strata") and thread not in others}
    for thread in threads:
        thread.join(10)
    return {thread for thread in threads if thread.is_alive()}


def descriptors() -> set[str]:
    """What is open, where the system tells: sockets by their number, files by their path."""
    found = set()
    for entry in DESCRIPTORS.iterdir() if DESCRIPTORS.is_dir() else ():
        try:
            found.add(os.readlink(entry))
        except OSError:  # the one that lists the folder
            continue
    return found


def is_mapped(path: Path) -> bool:
    return MAPS.is_file() and path.name in MAPS.read_text()


def blas_threads() -> list[int]:
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Threads, BLAS threads, mapped files and signal handlers are after the test as before."""
    handlers, blas, others = [signal.getsignal(number) for number in SIGNALS], blas_threads(), threading.enumerate()
    yield
    gc.collect()
    assert own_threads(others) == set()
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert blas_threads() == blas
    assert not is_mapped(TINY)


async def test_starts_and_stops_twice_in_one_loop(nothing_left_behind: None) -> None:
    async with serving():  # whatever a first server opens once and for all (the loop's own threads and sockets) is open now
        pass
    before = descriptors()
    for seed in range(2):
        handlers = [signal.getsignal(number) for number in SIGNALS]
        server = Server(Settings(model=TINY, port=0))
        await server.start()
        port = int(server.url.rpartition(":")[2])
        with Served(server) as served:
            assert len((await served.complete(some_tokens(20, seed))).tokens) == 16
        assert [signal.getsignal(number) for number in SIGNALS] == handlers
        await server.stop()
        assert descriptors() == before
        socket.create_server(("127.0.0.1", port)).close()


async def test_two_servers_side_by_side(nothing_left_behind: None) -> None:
    """One stops while the other goes on; the bits do not change."""
    async with serving() as one:
        async with serving() as other:
            stream = await (await one.stream(some_tokens(20), 60)).until(3)
            beside = await other.complete(some_tokens(20), 60)
        rest = await stream.finish()
        assert blas_threads() == [1] * len(blas_threads())
    assert rest.bits == beside.bits


async def test_stopping_ends_what_runs_and_may_be_repeated(nothing_left_behind: None) -> None:
    server = Server(Settings(model=TINY, port=0, context=1024))
    await server.start()
    with Served(server) as served:
        call = await served.call("POST", COMPLETIONS, completion(some_tokens(5), 900, stream=True))
        await call.event()
        await asyncio.gather(server.stop(0), server.stop(0))
        await server.stop()
        while "error" not in (event := await call.event()):
            pass
    assert event["error"]["code"] == "draining"


async def test_a_second_stop_cuts_a_long_drain_short(nothing_left_behind: None) -> None:
    server = Server(Settings(model=TINY, port=0, context=1024))
    await server.start()
    with Served(server) as served:
        stream = await (await served.stream(some_tokens(5), 900)).until(1)
        draining = asyncio.ensure_future(server.stop(300))
        while (await served.call("GET", "/ready")).status == 200:
            pass
        await server.stop(0)
        await draining
        with pytest.raises(AssertionError, match="draining"):
            await stream.finish()


async def test_a_start_that_fails_leaves_nothing(nothing_left_behind: None, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(TINY.read_bytes()[:-100_000])
    with socket.create_server(("127.0.0.1", 0)) as other:
        for settings, error in (
            (Settings(model=broken, port=0), ModelError), (Settings(model=TINY, port=other.getsockname()[1]), StartError),
        ):
            server = Server(settings)
            with pytest.raises(error):
                await server.start()
            await server.stop()
    assert not is_mapped(broken)


def progress_until(complete: int) -> tuple[asyncio.Event, threading.Event, Any]:
    """A progress callback that holds the loading thread at its first report (0), or at the first or second that says all is read."""
    loop, reached, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    reports: list[int] = []

    def progress(done: int, total: int) -> None:
        reports.append(done)
        if reports.count(total) == complete and (complete or len(reports) == 1):
            loop.call_soon_threadsafe(reached.set)
            assert go_on.wait(60)

    return reached, go_on, progress


@pytest.mark.parametrize("how", ["cancelled", "stopped"])
@pytest.mark.parametrize("complete", [0, 1, 2])
async def test_a_start_that_is_given_up_while_loading(nothing_left_behind: None, complete: int, how: str) -> None:
    """Nobody can end the loading thread but itself: at its next report of progress, or when all is loaded."""
    reached, go_on, progress = progress_until(complete)
    server = Server(Settings(model=TINY, port=0), progress)
    starting = asyncio.ensure_future(server.start())
    await reached.wait()
    port = int(server.url.rpartition(":")[2])
    if how == "cancelled":
        starting.cancel()
        await asyncio.wait({starting})
    else:
        await server.stop()
    socket.create_server(("127.0.0.1", port)).close()
    go_on.set()
    await asyncio.wait({starting})
    assert starting.cancelled() or isinstance(starting.exception(), StartError)
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_probes_are_answered_while_the_model_loads() -> None:
    reached, go_on, progress = progress_until(0)
    server = Server(Settings(model=TINY, port=0), progress)
    starting = asyncio.ensure_future(server.start())
    await reached.wait()
    with Address(server.url) as probe:
        assert await probe.get("/health") == {"status": "loading"}
        for method, path in (("GET", "/ready"), ("GET", "/v1/models"), ("POST", COMPLETIONS)):
            call = await probe.call(method, path, {"prompt": "x"})
            assert (call.status, (await call.json())["error"]["code"]) == (503, "loading")
            assert int(call.headers["retry-after"]) >= 1
        go_on.set()
        await starting
        assert (await probe.call("GET", "/ready")).status == 200
    await server.stop()


def test_inside_uvloop(nothing_left_behind: None) -> None:
    """As inside any other loop."""
    uvloop: Any = pytest.importorskip("uvloop", reason="there is no uvloop for Windows")

    async def host() -> list[int]:
        async with serving() as served:
            return (await served.complete(some_tokens(20))).tokens

    assert uvloop.run(host()) == uvloop.run(host()) == asyncio.run(host())


async def test_a_host_that_limits_blas_itself() -> None:
    """The limit is the process's; threadpoolctl listens to one thread alone, and ours are others."""
    before = threadpool_limits(2, user_api="blas")
    try:
        for _ in range(3):
            async with serving():
                assert blas_threads() == [1] * len(blas_threads())
            assert blas_threads() == [2] * len(blas_threads())
            threadpool_limits(2, user_api="blas")
    finally:
        before.restore_original_limits()


async def test_the_other_loopback_address() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback address")
    async with serving(host="::1") as served:
        assert served.url.startswith("http://[::1]:")
        assert len((await served.complete(some_tokens(5), 2)).tokens) == 2
