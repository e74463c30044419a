"""Drafts over HTTP: with ``--spec 4`` every answer has the tokens, logprobs and text that ``--spec 1`` gives; all counts agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata.messages import DraftLimits
from strata.request import Sampling
from strata.slots import speculation
from strata.slots.drafting import Cost, Prospect
from tests.e2e.client import Result
from tests.e2e.serving import COMPLETIONS, TINY, Served, completion, serving, some_tokens
from tests.engine.drafting import exact, rewritten
from tests.engine.test_draft_tokens import random_talk

REPEATS = [token for _ in range(12) for token in (40, 50, 60, 70, 80)]
PROMPTS = [
    some_tokens(90, 1), REPEATS, some_tokens(5, 3), some_tokens(40, 4) * 2, [9], REPEATS[3:], some_tokens(140, 6), some_tokens(33, 7),
]
SAMPLINGS: list[dict[str, Any]] = [
    {}, {}, {"temperature": 0.8, "seed": 7}, {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 1.2, "seed": 3, "top_k": 20}, {"frequency_penalty": 0.7, "temperature": 0.6, "seed": 5},
    {"logit_bias": {"77": 4.0}}, {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01, "seed": 1},
]
PIPELINE: dict[str, Any] = {"layer_split": (2,), "batch_groups": 2}


@pytest.fixture(scope="module")
def drafting_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose own head is right for most of the text."""
    return rewritten("glm4moe-accept-some-iq3s", tmp_path_factory.mktemp("model") / "model.gguf", exact)


@pytest.fixture(autouse=True)
def as_many_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice goes by measured times, and a model this small may be quicker without."""

    def everything(slots: Sequence[Prospect], cost: Cost, is_tried: bool) -> list[DraftLimits]:
        return [DraftLimits(len(slot.mtp), len(slot.lookup)) for slot in slots]

    monkeypatch.setattr(speculation, "choose", everything)


@asynccontextmanager
async def server(model: Path, spec: int, **settings: Any) -> AsyncIterator[Served]:
    async with serving(model, spec=spec, threads=1, context=512, **settings) as served:
        yield served


async def all_at_once(served: Served, tokens: int) -> list[Result]:
    """Eight answers of different lengths that begin one after the other and then run together."""
    streams = []
    for place, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS)):
        streams.append(await served.stream(prompt, tokens + 3 * place, **sampling))
        await streams[-1].until(1)
    return list(await asyncio.gather(*(stream.finish() for stream in streams)))


def bits(results: Sequence[Result]) -> list[Any]:
    return [result.bits for result in results]


alone: list[Result] = []
"""The answers without drafts, computed once."""


@pytest.mark.parametrize("settings", [{}, PIPELINE, {**PIPELINE, "rows": "prefix"}], ids=str)
async def test_eight_answers_at_once_are_those_without_drafts(drafting_model: Path, settings: dict[str, Any]) -> None:
    if not alone:
        async with server(drafting_model, 1) as served:
            for place, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS)):
                alone.append(await served.complete(prompt, 20 + 3 * place, cache_prompt=False, **sampling))
    async with server(drafting_model, 4, **settings) as served:
        tap = served.tap()
        together = await all_at_once(served, 20)
        counters = served.view().counters
    assert bits(together) == bits(alone)
    rows = [[len(segment.tokens) for segment in window.segments] for window in tap.windows if window.kind == "decode"]
    assert max(map(max, rows)) == 4 and max(map(len, rows)) >= 3, "several slots, and drafts"
    assert sum(counters.accepted.values()) > 20 and counters.drafted["mtp"] > 20


def body_of(sampling: Sampling) -> dict[str, Any]:
    """What a request says to be sampled so."""
    said = {each.name: getattr(sampling, each.name) for each in fields(Sampling) if each.name != "choice"}
    said["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    said["logprobs"] = None if sampling.logprobs < 0 else sampling.logprobs
    return said


async def test_random_requests_through_a_pipeline_get_what_they_get_without_drafts(drafting_model: Path) -> None:
    """Eight at once in two groups."""
    rng = np.random.default_rng(3)
    talks = [random_talk(rng, slot) for slot in range(8)]
    found: list[Any] = []
    arms: list[tuple[int, dict[str, Any]]] = [(1, {}), (4, PIPELINE)]
    for spec, settings in arms:
        async with server(drafting_model, spec, **settings) as served:
            tap = served.tap()
            asked = [served.complete(list(talk.prompt), talk.count, **body_of(talk.sampling)) for talk in talks]
            found.append(bits(await asyncio.gather(*asked)))
            accepted = served.view().counters.accepted
    assert found[0] == found[1] and [len(tokens) for tokens, _ in found[0]] == [talk.count for talk in talks]
    assert {window.group for window in tap.windows} == {0, 1} and accepted["mtp"] > 0 and accepted["lookup"] > 0


async def test_any_model_drafts_from_its_own_text() -> None:
    """No head: what was said before is looked up."""
    results = []
    for spec in (1, 4):
        async with server(TINY, spec) as served:
            results.append(await served.complete(REPEATS, 100, repetition_penalty=0.5))
            accepted = served.view().counters.accepted
    assert bits(results[:1]) == bits(results[1:])
    assert accepted["lookup"] > 0 == accepted["mtp"]


async def test_ends_are_where_they_are_without_drafts(drafting_model: Path) -> None:
    """Stop strings, stop tokens, every max_tokens, the end of the context, choices, and the next turn of each."""
    answers = []
    for spec in (1, 4):
        async with server(drafting_model, spec) as served:
            free = await served.post(COMPLETIONS, completion(PROMPTS[0], 60))
            text, ids = free["choices"][0]["text"], free["choices"][0]["token_ids"]
            bodies = [completion(PROMPTS[0], count) for count in range(1, 8)]
            bodies += [completion(PROMPTS[0], 60, stop=[text[at:at + 3]]) for at in (20, 45, 70)]
            bodies += [completion(PROMPTS[0], 60, stop_token_ids=[ids[at]]) for at in (5, 18, 33)]
            bodies += [completion(PROMPTS[3] * 5, None), completion(PROMPTS[2], 20, n=3, temperature=1, seed=4)]
            found = [await served.post(COMPLETIONS, body) for body in bodies]
            turn = [*PROMPTS[0], *found[8]["choices"][0]["token_ids"], *some_tokens(20, 9)]
            found.append(await served.post(COMPLETIONS, completion(turn, 30)))
            answers.append([(one["choices"], one["usage"]["completion_tokens"], one["usage"]["prompt_tokens"]) for one in found])
            drafted = sum(one["timings"]["draft_n"] for one in found)
            served.manager.machine.check_integrity()
    assert answers[0] == answers[1] and drafted > 50


async def test_the_counts_of_drafts_agree(drafting_model: Path) -> None:
    """Answers, usage, /metrics; also of a client that leaves in the middle."""
    async with server(drafting_model, 4) as served:
        leaving = await served.stream(PROMPTS[0], 300)
        await leaving.until(20)
        bodies = await asyncio.gather(*(served.post(COMPLETIONS, completion(prompt, 40)) for prompt in PROMPTS[:4]))
        leaving.leave()
        await served.until(lambda view: view.running == 0)
        text = (await (await served.call("GET", "/metrics")).read()).decode()
        counters = served.view().counters
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    named = {sample.name: sample.value for sample in samples if sample.name.startswith("vllm:spec_decode_num_")}
    del named["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert named == {
        "vllm:spec_decode_num_drafts_total": counters.drafts,
        "vllm:spec_decode_num_draft_tokens_total": sum(counters.drafted.values()),
        "vllm:spec_decode_num_accepted_tokens_total": sum(counters.accepted.values()),
    }
    drafted, accepted = (sum(body["timings"][name] for body in bodies) for name in ("draft_n", "draft_n_accepted"))
    assert 0 < accepted <= drafted <= sum(counters.drafted.values())
    for body in bodies:
        details = body["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == body["timings"]["draft_n_accepted"] <= body["usage"]["completion_tokens"]
    assert counters.draft_seconds > 0
