"""What every test may use: ``async def`` tests without a plugin, the jump clock, the model file.

An ``async def`` test runs on a fresh event loop. One that takes the ``jump_clock`` fixture runs on a loop whose time jumps
(tests/clock.py). Async fixtures are not supported: use ``async with`` in the test.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.clock import JumpClock, JumpLoop

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
HANG_SECONDS = 300.0

# The same examples in every run: a red test stays red. `pytest --hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile("strata", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("strata")


def run_async(function: Callable[..., Coroutine[Any, Any, None]], clock: JumpClock | None, **arguments: Any) -> None:
    """Run one async test on its own loop; leftover tasks are cancelled, the loop is closed."""
    if clock is None:
        asyncio.run(asyncio.wait_for(function(**arguments), HANG_SECONDS))
        return
    loop = JumpLoop(clock)
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(function(**arguments))
    finally:
        leftover = asyncio.all_tasks(loop)
        for task in leftover:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*leftover, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


def in_loop(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The same test as a plain function: what hypothesis calls once per example."""

    @functools.wraps(function)
    def call(**arguments: Any) -> None:
        run_async(function, None, **arguments)

    return call


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    function = pyfuncitem.obj
    clock = pyfuncitem.funcargs.get("jump_clock")
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", None)
    if inner is not None and inspect.iscoroutinefunction(inner):
        function.hypothesis.inner_test = in_loop(inner)
        return None
    if not inspect.iscoroutinefunction(function):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    run_async(function, clock, **{name: pyfuncitem.funcargs[name] for name in names})
    return True


@pytest.fixture
def jump_clock() -> JumpClock:
    """The test's clock: ``.now`` in seconds, ``.advance(seconds)``. The test's loop runs on it."""
    return JumpClock()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: 96 MB, fetched by tools/test.py; STRATA_TEST_MODEL names another copy."""
    path = Path(os.environ.get("STRATA_TEST_MODEL") or MODEL)
    if not path.is_file():
        pytest.skip(f"no model at {path.name}: run tools/test.py, or set STRATA_TEST_MODEL")
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)
