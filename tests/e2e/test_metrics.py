"""What a server says of itself while it works: /metrics, /slots and /v1/status at one moment, and in the middle of a prompt."""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from strata.messages import Window
from tests.e2e.serving import Served, serving, some_tokens


async def scraped(served: Served) -> dict[str, dict[str, float]]:
    """Name -> its one label's value ("" without) -> value."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families((await (await served.call("GET", "/metrics")).read()).decode()):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
            found.setdefault(sample.name, {})[",".join(labels)] = sample.value
    return found


async def test_three_routes_say_the_same_of_one_moment() -> None:
    """The moment is one in which the engine's windows are kept back: two answer, one reads, one waits, two histories are held."""
    async with serving(batch=5, chunk=32, queue_size=4) as served:
        for seed in (20, 21):
            await served.complete(some_tokens(40, seed), 4)
        streams = [await (await served.stream(some_tokens(9, seed), 200)).until(2) for seed in (1, 2)]
        tap = served.tap()
        tap.hold()
        reading = await served.open("POST", "/v1/completions", {"prompt": some_tokens(300, 3), "max_tokens": 9, "id_slot": 4})
        waiting = await served.open("POST", "/v1/completions", {"prompt": some_tokens(9, 4), "max_tokens": 9, "id_slot": 4})
        await served.until(lambda view: view.waiting == 1 and view.windows_in_flight == tap.num_held > 0)
        slots, status, metrics = await served.get("/slots"), await served.get("/v1/status"), await scraped(served)
        assert [still(slot) for slot in await served.get("/slots")] == [still(slot) for slot in slots], "it was one moment"
        tap.release()
        check(slots, status, metrics)
        for each in (*streams, reading, waiting):
            each.leave()


def still(slot: dict[str, Any]) -> dict[str, Any]:
    """Without what goes on while everything rests."""
    return {name: value for name, value in slot.items() if name != "idle_seconds"}


def check(slots: list[dict[str, Any]], status: dict[str, Any], metrics: dict[str, dict[str, float]]) -> None:
    states = {state: sum(slot["state"] == state for slot in slots) for state in metrics["strata_slots"]}
    assert states == metrics["strata_slots"] and {state: count for state, count in states.items() if count} == status["slots"]
    assert states["decoding"] == 2 and states["held"] == 2 and states["reading"] == 1
    requests = status["requests"]
    assert requests["running"] == metrics["vllm:num_requests_running"][""] == sum(slot["is_processing"] for slot in slots) == 3
    assert requests["waiting"] + requests["preempted"] == metrics["vllm:num_requests_waiting"][""] == metrics["strata_queue_depth"][""] == 1
    for each in (status, *slots):
        pages = dict(each["pages"])
        assert pages.pop("tokens_per_page") == metrics["strata_page_tokens"][""]
        total = pages.pop("total")
        assert pages == metrics["strata_pages"] and total == sum(pages.values())
        assert pages["busy"] / total == metrics["vllm:kv_cache_usage_perc"][""]
        assert {place: each["conversations"][place] for place in ("shelved", "parked")} == metrics["strata_conversations"]
        assert each["conversations"]["parked_bytes"] == metrics["strata_parked_bytes"][""]
    assert sum(slot["n_tokens"] for slot in slots) == metrics["strata_held_tokens"][""]
    assert status["engine"] == "up" and metrics["strata_engine_up"][""] == 1 and metrics["strata_ready"][""] == 1
    (device,) = status["devices"]
    assert metrics["strata_device_weights_bytes"] == {device["name"]: device["weights"]}
    assert metrics["strata_device_kv_bytes"] == {device["name"]: device["kv"]}


async def test_metrics_answer_in_the_middle_of_a_prompt() -> None:
    """The chunk that the engine computes cannot end before /metrics has answered."""
    async with serving(chunk=64) as served:
        model = served.manager.engine.stages[0].model  # type: ignore[attr-defined]
        forward, begun, answered = model.forward, threading.Event(), threading.Event()

        def slow(window: Window, hidden: object) -> object:
            begun.set()
            assert answered.wait(200), "the answer waits for the chunk"
            return forward(window, hidden)

        model.forward = slow
        call = await served.open("POST", "/v1/completions", {"prompt": some_tokens(200), "max_tokens": 1})
        await served.until(lambda view: begun.is_set())
        metrics = await scraped(served)
        answered.set()
        assert metrics["strata_slots"]["reading"] == 1 and metrics["strata_windows_in_flight"][""] >= 1
        assert (await call.answered()).status == 200
