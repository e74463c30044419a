"""/metrics: its form, its truth, its labels; and the log line, which says the same."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from strata.config.settings import Settings
from strata.console import JsonFormatter
from strata.metric_table import METRICS
from strata.server.heartbeat import Heartbeat
from strata.server.host import memory_bytes
from strata.server.requestlog import escaped
from strata.slots import SlotPolicy
from tests.clock import JumpClock
from tests.server.harness import CONTEXT, ScriptedEngine, World, says, settle

PATH = "/v1/completions"


async def scrape(world: World) -> dict[str, float]:
    """Every sample by name and labels (without the constant ones)."""
    text = (await world.get("/metrics")).body.decode()
    samples: dict[str, float] = {}
    for family in parse_text(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()) if name not in ("model_name", "engine"))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in samples, "one sample for each name and label set"
            samples[key] = sample.value
    return samples


async def test_both_expositions_parse() -> None:
    world = World()
    text = await world.get("/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=")
    assert len(list(parse_text(text.body.decode()))) >= len(METRICS)
    names = {sample.name for family in parse_text(text.body.decode()) for sample in family.samples}
    for accept in ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text;version=0.0.1;q=0.8,text/plain;q=0.3"):
        openmetrics = await world.get("/metrics", Accept=accept)
        assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
        families = list(parse_openmetrics(openmetrics.body.decode()))
        assert {sample.name for family in families for sample in family.samples} >= names


async def test_every_metric_of_the_table_is_there_with_its_help() -> None:
    world = World()
    await world.get("/health")
    families = {family.name: family for family in parse_text((await world.get("/metrics")).body.decode())}
    for metric in METRICS:
        family = families[metric.name]
        assert family.documentation == metric.help and family.type == metric.kind
        assert family.samples or metric.name == "strata_host_memory_bytes", "which is Linux's"
    assert not [name for name in families if name.endswith("_created")]


async def test_counters_equal_what_clients_saw() -> None:
    world = World()
    prompt = generated = cached = 0
    for n in range(8):
        body = {"prompt": "x" * (20 + 10 * n), "max_tokens": 20 if n % 2 else 5, "stop": "wor" if n == 3 else None}
        usage = (await world.post(PATH, body)).json["usage"]
        prompt += usage["prompt_tokens"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
        generated += usage["completion_tokens"]
    assert (await world.post(PATH, {"prompt": ""})).status == 400
    samples = await scrape(world)
    assert cached > 0
    assert samples["vllm:prompt_tokens_total"] == samples["vllm:prefix_cache_queries_total"] == prompt
    assert samples["vllm:prompt_tokens_cached_total"] == samples["vllm:prefix_cache_hits_total"] == cached
    assert samples["vllm:generation_tokens_total"] == samples["vllm:request_generation_tokens_sum"] == generated
    assert samples["vllm:request_success_total{finished_reason=length}"] == 4
    assert samples["vllm:request_success_total{finished_reason=stop}"] == 4
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert samples[f"vllm:{name}_seconds_count"] == 8
    assert samples["vllm:inter_token_latency_seconds_count"] == generated - 8
    assert samples["strata_http_requests_total{route=/v1/completions,status=2xx}"] == 8
    assert samples["strata_http_requests_total{route=/v1/completions,status=4xx}"] == 1
    assert sum(value for key, value in samples.items() if key.startswith("strata_reuse_total")) == 8


async def test_two_scrapes_see_the_same() -> None:
    world = World()
    await world.post(PATH, {"prompt": "x"})
    first, second = await scrape(world), await scrape(world)
    assert {name for name in first if first[name] != second.get(name)} <= {
        name for name in second if name.startswith(("strata_http_request", "process_", "strata_host_memory"))
    }


async def test_a_mass_cancel_leaves_no_gauge_behind_and_counts_aborts_once() -> None:
    world = World(engine=ScriptedEngine(says([], 5), CONTEXT, is_manual=True))
    clients = [world.connect() for _ in range(5)]
    for n, client in enumerate(clients):
        await client.start("POST", PATH, {"prompt": f"{n}", "stream": True, "max_tokens": 100})
    for _ in range(12):
        await settle()
        world.engine.step()
    busy = await scrape(world)
    assert busy["vllm:num_requests_running"] == 4 and busy["vllm:num_requests_waiting"] == 1
    assert 0 < busy["vllm:kv_cache_usage_perc"] < 1
    for client in clients:
        client.leave()
    await settle()
    while world.engine.windows:
        world.engine.step()
        await settle()
    samples = await scrape(world)
    assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == samples["vllm:kv_cache_usage_perc"] == 0
    assert samples["vllm:request_success_total{finished_reason=abort}"] == samples["vllm:e2e_request_latency_seconds_count"] == 5
    assert samples["strata_slots{state=empty}"] + samples["strata_slots{state=held}"] == 4
    assert sum(samples[f"strata_pages{{state={state}}}"] for state in ("free", "busy", "held", "shelved")) == 1024


async def test_clients_cannot_make_series() -> None:
    world = World()
    await world.post(PATH, {"prompt": "x", "model": "m", "user": "u"})
    await scrape(world)
    before = len(await scrape(world))
    for n in range(50):
        await world.post(PATH, {"prompt": "x", "model": f"m{n}", "user": f"u{n}"}, X_Session_ID=f"s{n}")
        await world.get(f"/nosuch/{n}")
    assert len(await scrape(world)) == before


async def test_metrics_answer_while_loading() -> None:
    world = World(loaded=False)
    samples = await scrape(world)
    assert samples["vllm:generation_tokens_total"] == samples["strata_ready"] == 0 and "vllm:num_requests_running" not in samples
    world.load()
    assert (await scrape(world))["strata_ready"] == 1
    world.site.is_draining = True
    assert (await scrape(world))["strata_ready"] == 0


async def test_refusals_are_counted_by_reason() -> None:
    world = World(
        engine=ScriptedEngine(says([], 5), CONTEXT, is_manual=True), settings=Settings(batch=1, api_key="k"),
        policy=SlotPolicy(slots=1, queue_limit=0),
    )
    busy = world.connect()
    await busy.start("POST", PATH, {"prompt": "x", "max_tokens": 9}, x_api_key="k")
    await settle()
    for body, key in (({"prompt": "y"}, "k"), ({"prompt": "y"}, "no"), ({"prompt": "y" * 300}, "k"), ({"prompt": "y", "n": 0}, "k")):
        await world.post(PATH, body, x_api_key=key)
    world.site.is_draining = True
    await world.post(PATH, {"prompt": "y"}, x_api_key="k")
    world.engine.fail("lost")
    await busy.answer()
    text = world.metrics.render("")[0].decode()
    for reason in ("queue_full", "access", "context", "other", "draining", "engine"):
        assert f'strata_refused_total{{reason="{reason}"}} 1.0' in text
    assert 'strata_refused_total{reason="too_large"} 0.0' in text


async def test_logits_that_are_no_numbers_are_counted_apart_from_lost_windows() -> None:
    world = World(engine=ScriptedEngine(says([], 5), CONTEXT, is_manual=True))
    answers = []
    for fate in (lambda: world.engine.step("no numbers"), lambda: world.engine.fail("stage 1: lost")):
        client = world.connect()
        await client.start("POST", PATH, {"prompt": "x"})
        await settle()
        fate()
        answers.append(await client.answer())
    assert [answer.status for answer in answers] == [500, 500]
    assert [answer.error["code"] for answer in answers] == ["not_finite", 500]
    samples = await scrape(world)
    assert samples["vllm:corrupted_requests_total"] == 1
    assert samples["vllm:request_success_total{finished_reason=error}"] == samples["strata_refused_total{reason=engine}"] == 2


async def test_the_loops_lateness_is_measured(jump_clock: JumpClock) -> None:
    seen: list[float] = []
    heartbeat = Heartbeat(seen.append, asyncio.get_running_loop().time)
    heartbeat.start()
    await asyncio.sleep(1.5)
    assert seen == [0.0]
    jump_clock.advance(2)
    await asyncio.sleep(0.1)
    assert seen == [0.0, pytest.approx(1.5)]
    heartbeat.stop()
    await asyncio.sleep(5)
    assert len(seen) == 2


async def test_slots_status_and_metrics_agree() -> None:
    world = World(engine=ScriptedEngine(says([], 5), CONTEXT, is_manual=True))
    for n in range(3):
        await world.connect().start("POST", PATH, {"prompt": f"{n}", "max_tokens": 50})
    for _ in range(4):
        await settle()
        world.engine.step()
    await settle()
    samples, slots, status = await scrape(world), (await world.get("/slots")).json, (await world.get("/v1/status")).json
    by_state: dict[str, int] = {}
    for slot in slots:
        by_state[slot["state"]] = by_state.get(slot["state"], 0) + 1
    assert by_state == status["slots"] == {
        state: samples[f"strata_slots{{state={state}}}"] for state in by_state
    }
    assert status["requests"]["running"] == samples["vllm:num_requests_running"] == sum(slot["is_processing"] for slot in slots)
    for each in (status, *slots):
        for state in ("free", "busy", "held", "shelved"):
            assert each["pages"][state] == samples[f"strata_pages{{state={state}}}"]
        assert each["conversations"]["parked_bytes"] == samples["strata_parked_bytes"]


def test_memory_as_linux_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       16 kB\nMemFree:        3 kB\nMemAvailable:   8 kB\nHugePages_Total:  0\n", encoding="ascii")
    assert memory_bytes(path) == {"total": 16384, "available": 8192}
    assert memory_bytes(tmp_path / "none") == {}


def test_names_are_unique_and_units_known() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.help.endswith(".") and re.fullmatch(r"(vllm:|strata_)[a-z0-9_]+", metric.name)
        assert (metric.kind == "histogram") == bool(metric.buckets)


# ---------------------------------------------------------------- the log line


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "strata.request"]


async def test_one_line_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    await world.post(PATH, {"prompt": "a secret", "n": 2, "max_tokens": 3}, X_Request_ID="job-1", Authorization="Bearer secret")
    await world.get("/health")
    await world.get("/a%0Afake=1")
    first, second = lines(caplog)
    assert "request=job-1" in first and "route=/v1/completions" in first and "status=200" in first
    assert "end=length" in first and "generated=6" in first and "secret" not in first
    assert "route=other" in second and "status=404" in second and "error=not_found" in second and "fake" not in second


async def test_json_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    await world.post(PATH, {"prompt": "x" * 40, "max_tokens": 3})
    await world.post(PATH, {"prompt": "x" * 40 + "hel", "max_tokens": 3})
    records = [record for record in caplog.records if record.name == "strata.request"]
    facts: list[dict[str, Any]] = [json.loads(JsonFormatter().format(record)) for record in records]
    assert facts[0]["message"] == "request" and facts[0]["level"] == "info"
    assert facts[1]["reused"] + facts[1]["read"] == 43 and facts[1]["reused"] > 0
    assert {"request", "client", "route", "slot", "queue_ms", "prompt_ms", "decode_ms", "drafted", "accepted", "ms"} <= set(facts[0])


@pytest.mark.parametrize("text", ["a\nb", "a\x1b[31mb", "a\rb", "a b", "a\u2028b", "a\x00b"])
def test_control_characters_are_escaped(text: str) -> None:
    assert escaped(text).isprintable() and " " not in escaped(text)
