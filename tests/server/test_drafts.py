"""Drafts behind the HTTP server: several tokens at once change no answer, and every count of them is the same number."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from strata.config.settings import Settings
from strata.console import JsonFormatter
from strata.messages import Segment, SegmentResult
from tests.server.engine import ScriptedEngine, distribution, says
from tests.server.harness import CONTEXT, END, World, settle, tokens
from tests.server.test_metrics import scrape

PATH = "/v1/completions"
TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."


class DraftingEngine(ScriptedEngine):
    """Drafts what its script says next; of every ``good + 1`` places of an answer one is drafted wrong."""

    def __init__(self, good: int, is_manual: bool = False) -> None:
        super().__init__(says(tokens(TEXT), END), CONTEXT, is_manual)
        self.good = good
        self.foreseen: list[int] = []  # places of answers whose token had been drafted
        self.facts = replace(self.facts, max_drafts=3, draft_sources=("mtp", "lookup"))

    def _result(self, segment: Segment) -> SegmentResult:
        first = segment.end - segment.num_drafts
        plain = super()._result(replace(segment, tokens=segment.tokens[:first - segment.start]))
        if segment.sampling is None:
            return plain
        place = first - self._origins[segment.request_id]
        picks = [self.script(segment, place + row) for row in range(segment.num_drafts + 1)]
        accepted = next((row for row, draft in enumerate(segment.tokens[-segment.num_drafts:]) if draft != picks[row]), 0)
        if segment.num_drafts and list(segment.tokens[-segment.num_drafts:]) == picks[:-1]:
            accepted = segment.num_drafts
        self.foreseen += range(place, place + accepted)
        picks, wanted = picks[:accepted + 1], segment.sampling.logprobs
        logprobs = tuple(distribution(token, place + row, wanted) for row, token in enumerate(picks)) if wanted >= 0 else ()
        source = "lookup" if place % 5 == 0 else "mtp"
        limit = getattr(segment.draft_limits, source)
        drafts = tuple(self._draft(segment, place + accepted + 1 + depth) for depth in range(limit))
        given = {"drafts": drafts, "draft_source": source} if drafts else {}
        return replace(plain, picks=tuple(picks), accepted=accepted, logprobs=logprobs, **given)

    def _draft(self, segment: Segment, place: int) -> int:
        return self.script(segment, place) + (place % (self.good + 1) == self.good)


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between any two answers, and without how it was done."""
    details = answer.get("usage", {}).get("completion_tokens_details", {})
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        details.pop(name, None)
    return {name: value for name, value in answer.items() if name not in ("id", "created", "seed", "timings")}


BODIES: list[dict[str, Any]] = [
    {"max_tokens": 40}, {"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 200}, {"max_tokens": 200, "ignore_eos": True},
    {"max_tokens": 60, "stop": "lazy"}, {"max_tokens": 60, "stop": ["x j", "zzz"], "logprobs": 2},
    {"max_tokens": 60, "stop_token_ids": tokens("z")},
    {"max_tokens": 30, "n": 3}, {"max_tokens": 30, "logprobs": 3, "echo": True},
]


@pytest.mark.parametrize("good", [0, 1, 2, 99])
async def test_answers_are_those_without_drafts(good: int) -> None:
    plain, drafting = World(engine=ScriptedEngine(says(tokens(TEXT), END), CONTEXT)), World(engine=DraftingEngine(good))
    for body in BODIES:
        alone, drafted = [(await world.post(PATH, {"prompt": "Say it:", **body})).json for world in (plain, drafting)]
        assert comparable(drafted) == comparable(alone), body
        assert alone["timings"]["draft_n"] == 0
    samples = await scrape(drafting)
    assert samples["vllm:spec_decode_num_drafts_total"] > 10
    assert samples["vllm:spec_decode_num_accepted_tokens_total"] > 10 or not good


async def test_a_stream_says_the_same_in_fewer_pieces() -> None:
    texts, pieces = [], []
    for engine in (ScriptedEngine(says(tokens(TEXT), END), CONTEXT), DraftingEngine(99)):
        events = (await World(engine=engine).post(PATH, {"prompt": "Say it:", "max_tokens": 99, "stream": True, "stop": "dog, and"})).events
        texts.append("".join(event["choices"][0]["text"] for event in events if event["choices"]))
        pieces.append(len(events))
    assert texts[0] == texts[1] == TEXT[:TEXT.index("dog, and")]
    assert pieces[1] < pieces[0]


@pytest.mark.parametrize("last", range(3, 24))
async def test_drafts_behind_a_stop_string_were_not_accepted_for_the_answer(last: int) -> None:
    """Wherever it ends among the tokens of a window; of these texts a token is a character."""
    engine = DraftingEngine(99)
    body = {"prompt": "Say it:", "max_tokens": 60, "stop": TEXT[last - 3:last]}
    answer = (await World(engine=engine).post(PATH, body)).json
    length, right = answer["usage"]["completion_tokens"], answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert answer["choices"][0]["finish_reason"] == "stop" and length <= last
    assert right == answer["timings"]["draft_n_accepted"] == sum(place < length for place in engine.foreseen) < length


async def test_every_count_of_drafts_is_the_same_number(caplog: pytest.LogCaptureFixture) -> None:
    """Answers, log lines, /metrics: of requests that ended well, with a stop string, were left by their client, or failed."""
    caplog.set_level(logging.INFO)
    world = World(engine=DraftingEngine(2, is_manual=True), settings=Settings(batch=4, log_format="json"))
    engine = world.engine
    assert isinstance(engine, DraftingEngine)
    clients = [world.connect() for _ in range(4)]
    for n, client in enumerate(clients):
        await client.start("POST", PATH, {"prompt": f"{n} Say it:", "max_tokens": 50, "stop": "fox" if n == 1 else None})
    for step in range(60):
        await settle()
        if step == 6:
            clients[2].leave()
        if step == 8:
            engine.fail("lost")
        elif engine.windows:
            engine.step()
    await settle()
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == "strata.request"]
    assert len(lines) == 4
    samples, slots = await scrape(world), (await world.get("/slots")).json
    drafted, accepted = (sum(line[name] for line in lines) for name in ("drafted", "accepted"))
    assert drafted > accepted > 0
    assert samples["vllm:spec_decode_num_draft_tokens_total"] == drafted
    assert samples["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    assert sum(samples[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{position={place}}}"] for place in range(3)) == accepted
    for name, count in (("strata_draft_tokens", drafted), ("strata_draft_accepted_tokens", accepted)):
        assert sum(samples[f"{name}_total{{source={source}}}"] for source in ("mtp", "lookup")) == count
    assert 0 < samples["vllm:spec_decode_num_drafts_total"] <= drafted
    assert all(slot["drafts_wanted"] == {"mtp": 0, "lookup": 0} for slot in slots), "nobody decodes"


async def test_a_slot_tells_how_its_drafts_fare() -> None:
    world = World(engine=DraftingEngine(99, is_manual=True))
    engine = world.engine
    assert isinstance(engine, DraftingEngine)
    await world.connect().start("POST", PATH, {"prompt": "Say it:", "max_tokens": 50})
    for _ in range(5):
        await settle()
        engine.step()
    await settle()
    slot = next(slot for slot in (await world.get("/slots")).json if slot["is_processing"])
    assert slot["n_drafts"] == 4 and slot["n_decoded"] == 5 + slot["n_drafted"], "each window: its own token, and all its drafts"
    assert slot["n_accepted"] == slot["n_drafted"] >= 4
    samples = await scrape(world)
    for source, wanted in slot["drafts_wanted"].items():
        assert 1 <= wanted <= 3 and samples[f"strata_drafts_wanted{{source={source}}}"] == wanted
