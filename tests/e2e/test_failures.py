"""Faults in the engine: a row, a window, the whole of it. What is not struck goes on, and what is says so."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from strata.messages import Window
from tests.e2e.serving import COMPLETIONS, Served, completion, serving, some_tokens


def strike(served: Served, fault: Any) -> None:
    """``fault(window, logits)`` is called between the last layer and the picks."""
    model = served.manager.engine.stages[-1].model  # type: ignore[attr-defined]
    forward = model.forward

    def struck(window: Window, hidden: Any) -> Any:
        logits = forward(window, hidden)
        fault(window, logits)
        return logits

    model.forward = struck


async def failure(served: Served, prompt: list[int], **more: Any) -> dict[str, Any]:
    """The error of a request that must fail, as a whole answer or as a stream's last event."""
    call = await served.call("POST", COMPLETIONS, completion(prompt, 20, **more))
    if call.status != 200:
        return {**(await call.json())["error"], "status": call.status}
    while "error" not in (event := await call.event()):
        pass
    assert await call.event() is None
    return {**event["error"], "status": 200}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [50, 55])
async def test_one_bad_row_ends_one_request(at: int, stream: bool) -> None:
    """M1: at its first token, and in the middle of its answer. The neighbours' tokens are what they are alone."""
    prompts = [some_tokens(20, seed) for seed in range(3)]

    def fault(window: Window, logits: Any) -> None:
        picked = [row for row in window.segments if row.sampling is not None]
        for place, row in enumerate(picked):
            if row.request_id in struck and row.end >= at:
                logits[place] = np.nan

    async with serving() as served:
        alone = [await served.complete(prompt, 60, cache_prompt=False) for prompt in prompts]
        struck: set[str] = set()
        strike(served, fault)
        streams = [await served.stream(prompt, 60, cache_prompt=False) for prompt in prompts]
        await asyncio.gather(*(each.until(1) for each in streams))
        tap = served.tap()
        tap.hold()
        task = asyncio.ensure_future(failure(served, some_tokens(50, 9), stream=stream))
        view = await served.until(lambda view: view.running == 4)
        struck.add(next(slot.request_id for slot in view.slots if slot.prompt == 50))
        tap.release()
        error = await task
        together = [await each.finish() for each in streams]
        assert len((await served.complete(some_tokens(5), 3)).tokens) == 3
        assert served.view().counters.ended["failed"] == 1
    assert error["type"] == "engine_error"
    assert [result.bits for result in together] == [result.bits for result in alone]


async def test_a_window_that_fails_ends_its_requests_and_no_others() -> None:
    calls = 0

    def fault(window: Window, logits: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise MemoryError("no memory for this window")

    async with serving() as served:
        strike(served, fault)
        error = await failure(served, some_tokens(30))
        assert error["status"] == 500 and error["type"] == "engine_error" and "no memory" in error["message"]
        assert await served.get("/health") == {"status": "ok"}
        again = await served.complete(some_tokens(30), 20)
    async with serving() as served:
        assert again.tokens == (await served.complete(some_tokens(30), 20)).tokens


async def test_an_engine_that_dies_is_unhealthy_and_answers_everybody() -> None:
    def fault(window: Window, logits: Any) -> None:
        raise SystemExit("the device is gone")

    async with serving(batch=1) as served:
        strike(served, fault)
        errors = await asyncio.gather(*(failure(served, some_tokens(9, seed)) for seed in range(3)))
        for error in errors:
            assert error["status"] in (500, 503)
        health, ready = await served.call("GET", "/health"), await served.call("GET", "/ready")
        assert (health.status, ready.status) == (503, 503)
        refused = await failure(served, some_tokens(5))
        assert (refused["status"], refused["type"]) == (503, "unavailable_error")
