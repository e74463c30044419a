"""A layer split behind the API: stages at work at the same time, a stage that fails, a stage that ends, clients that leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata.messages import Window
from tests.e2e.serving import COMPLETIONS, Served, assert_same, cold, completion, serving, some_tokens

WAIT = 100.0  # a deadline for a pipeline that does not overlap; nothing here waits for time to pass
LONG = 400


def stage_model(served: Served, stage: int) -> Any:
    return served.manager.engine.stages[stage].model  # type: ignore[attr-defined]


def before_forward(served: Served, stage: int, what: Callable[[Window], None]) -> None:
    """``what`` runs on the stage's thread before every window."""
    model = stage_model(served, stage)
    forward = model.forward

    def watched(window: Window, hidden: object) -> object:
        what(window)
        return forward(window, hidden)

    model.forward = watched


class Together:
    """Once ``ask`` is called, stage 1 begins its next ``count`` windows of a kind only when stage 0 has begun a later one.

    Made before the first window: of one that it had not seen begin nobody could tell that it is later. ``met``: how often it had.
    """

    def __init__(self, served: Served, kind: str) -> None:
        self.kind, self.count, self.met = kind, 0, 0
        self._begun = [0]
        self._news = threading.Condition()
        before_forward(served, 0, self._first)
        before_forward(served, 1, self._second)

    def ask(self, count: int) -> Together:
        self.count = count
        return self

    def _first(self, window: Window) -> None:
        with self._news:
            self._begun.append(window.id)
            self._news.notify_all()

    def _second(self, window: Window) -> None:
        if window.kind != self.kind or self.met >= self.count:
            return
        with self._news:
            if not self._news.wait_for(lambda: self._begun[-1] > window.id, WAIT):
                raise AssertionError("the stages take turns instead of working together")
        self.met += 1


async def running(served: Served, count: int, tokens: int = LONG) -> list[Any]:
    streams = [await served.stream(some_tokens(5 + seed, seed), tokens) for seed in range(count)]
    await asyncio.gather(*(stream.until(1) for stream in streams))
    return streams


async def test_groups_keep_both_stages_at_work() -> None:
    """L8."""
    async with serving(layer_split=(2,), batch=4, batch_groups=2) as served:
        together = Together(served, "decode")
        streams = await running(served, 4)
        together.ask(10)
        await asyncio.gather(*(stream.until(30) for stream in streams))
        while together.met < 10:  # some streams were far ahead of others
            assert await streams[-1].next()
        families = {family.name: family for family in text_string_to_metric_families((await metrics(served)))}
        for name in ("strata_stage_busy_seconds", "strata_stage_wait_seconds", "strata_stage_windows"):
            samples = {sample.labels["stage"]: sample.value for sample in families[name].samples}
            assert set(samples) == {"0", "1"} and min(samples.values()) > 0
        assert families["strata_batch_groups"].samples[0].value == 2
        for stream in streams:
            stream.leave()


async def metrics(served: Served) -> str:
    return (await (await served.call("GET", "/metrics")).read()).decode()


async def test_the_next_chunk_of_a_prompt_enters_while_the_one_before_is_further_on() -> None:
    async with serving(layer_split=(2,), chunk=128) as served:
        together = Together(served, "prompt").ask(6)
        result = await served.complete(some_tokens(900), 4)
        assert together.met == 6
    assert_same(result, await cold(some_tokens(900), 4))


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_stage_that_fails_ends_the_requests_of_its_window_alone(stage: int) -> None:
    """The group whose window was lost gets an error that names the stage; the other group's answers are what they are alone."""
    lost: list[Window] = []

    def fail(window: Window) -> None:
        if not lost and window.kind == "decode" and len(window.segments) == 2:
            lost.append(window)
            raise RuntimeError("lost the device")

    async with serving(layer_split=(1, 3), batch=4, batch_groups=2) as served:
        calls = [await served.open("POST", COMPLETIONS, completion(some_tokens(5 + seed, seed), 60)) for seed in range(4)]
        await served.until(lambda view: sum(slot.state == "decoding" for slot in view.slots) == 4)
        before_forward(served, stage, fail)
        answers = [await (await call.answered()).json() for call in calls]
        statuses = [call.status for call in calls]
        assert sorted(statuses) == [200, 200, 500, 500]
        for seed, (status, answer) in enumerate(zip(statuses, answers)):
            if status == 500:
                assert f"stage {stage} (cpu, layers " in answer["error"]["message"] and "lost the device" in answer["error"]["message"]
            else:
                assert answer["choices"][0]["token_ids"] == (await cold(some_tokens(5 + seed, seed), 60)).tokens
        assert served.view().counters.ended == {"stop": 0, "length": 2, "cancelled": 0, "failed": 2}
        result = await served.complete(some_tokens(9, 7), 8)
        served.manager.machine.check_integrity()
    assert_same(result, await cold(some_tokens(9, 7), 8))


async def test_a_stage_that_ends_ends_every_request_once_and_shows() -> None:
    async with serving(layer_split=(2,), batch=4, batch_groups=2, queue_size=8) as served:
        calls = [await served.open("POST", COMPLETIONS, completion(some_tokens(5 + seed, seed), LONG)) for seed in range(6)]
        await served.until(lambda view: sum(slot.state == "decoding" for slot in view.slots) == 4 and view.waiting == 2)

        def leave(window: Window) -> None:
            raise SystemExit("driver gone")

        before_forward(served, 1, leave)
        for call in calls:
            error = (await (await call.answered()).json())["error"]
            assert call.status == 503 and "stage 1 (cpu, layers 2 to 3): SystemExit: driver gone" in error["message"]
        health = await served.call("GET", "/health")
        assert health.status == 503
        assert served.view().counters.ended["failed"] == 6


async def test_clients_that_leave_a_pipeline_free_their_slots() -> None:
    async with serving(layer_split=(1, 2, 3), batch=4) as served:
        streams = await running(served, 4)
        for stream in streams[:3]:
            stream.leave()
        await served.until(lambda view: view.running == 1)
        last = streams[3]
        await last.until(60)
        last.leave()
        await served.until(lambda view: not view.running and not view.windows_in_flight)
        assert served.view().pages_busy == 0
        served.manager.machine.check_integrity()


async def test_the_log_says_why_stages_take_turns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "strata"):
        async with serving(layer_split=(2,), batch=3):
            pass
        assert "3 slots in 1 group on 2 stages: while slots decode, at most 1 works at a time; a multiple of 2 slots" in caplog.text
        caplog.clear()
        async with serving(layer_split=(2,), batch=4):
            pass
    assert "groups on" not in caplog.text
