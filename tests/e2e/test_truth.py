"""Forty requests over HTTP whose client, and whose engine, keep their own books: /metrics must say exactly the same.

Real sockets, routes, slot manager and metrics; a scripted engine that answers one window at a time, so that each delivery of tokens is
an event of its own and a client that leaves has seen what was generated. Every counter and histogram of the table has its line in
the books, or is named as one that no client can know.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from strata.config import Settings
from strata.messages import Segment, SegmentResult
from strata.metric_table import METRICS
from strata.server.limits import Limits
from strata.server.listener import Listener
from strata.slots import SlotPolicy
from tests.e2e.serving import Address
from tests.server.harness import World, settle, tokens
from tests.server.test_drafts import DraftingEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DRAFTED = "#"  # a prompt that begins so gets drafts
# What depends on the machine and not on the requests; tests/server has what they say.
NOT_OF_REQUESTS = {
    "strata_loop_lag_seconds", "strata_draft_seconds", "strata_stage_busy_seconds", "strata_stage_wait_seconds", "strata_stage_windows",
}


class Engine(DraftingEngine):
    """Drafts for marked prompts; answers windows when told to, or as they come while ``is_free``. ``checked`` and ``right``: drafts
    by source."""

    def __init__(self) -> None:
        super().__init__(good=2, is_manual=True)
        self.is_free = True
        self.checked: Counter[str] = Counter()
        self.right: Counter[str] = Counter()
        self._marked = tokens(DRAFTED)[0]
        self._sources: dict[str, str] = {}

    def _result(self, segment: Segment) -> SegmentResult:
        result = super()._result(segment)
        source = self._sources.get(segment.request_id, "")
        self.checked[source] += segment.num_drafts
        self.right[source] += result.accepted
        self._sources[segment.request_id] = result.draft_source
        if segment.history is not None and segment.history[0][0] == self._marked:
            return result
        return SegmentResult(result.picks, result.accepted, result.logprobs, result.prompt_logprobs)

    async def run(self) -> None:
        """One window, then everything that follows from it, then the next."""
        while True:
            if self.is_free and self.windows:
                self.step()
            await settle(5)


class Books:
    """What the client saw. ``counts``: a series' name and labels, as /metrics writes them, to its value."""

    def __init__(self, address: Address, world: World, engine: Engine) -> None:
        self.address, self.world, self.engine = address, world, engine
        self.counts: Counter[str] = Counter()
        self.requests = 0

    def add(self, name: str, count: float = 1, **labels: object) -> None:
        self.counts[series(name, labels)] += count  # type: ignore[assignment]

    def http(self, route: str, status: int) -> None:
        """``status`` 0: the client left before there was one."""
        self.requests += 1
        self.add("strata_http_requests_total", route=route, status=f"{status // 100}xx" if status else "gone")
        self.add("strata_http_request_seconds_count")

    def ended(self, reason: str, prompt: int, cached: int, generated: int, deliveries: int, choices: int = 1) -> None:
        """Choices ended; ``deliveries``: of tokens, in all of them."""
        self.add("vllm:request_success_total", choices, finished_reason=reason)
        for name in ("prompt_tokens_total", "prefix_cache_queries_total", "request_prompt_tokens_sum"):
            self.add(f"vllm:{name}", prompt)
        for name in ("prompt_tokens_cached_total", "prefix_cache_hits_total"):
            self.add(f"vllm:{name}", cached)
        for name in ("generation_tokens_total", "request_generation_tokens_sum"):
            self.add(f"vllm:{name}", generated)
        for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
                     "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens"):
            self.add(f"vllm:{name}_count", choices)
        if deliveries:
            self.add("vllm:time_to_first_token_seconds_count", choices)
            self.add("vllm:inter_token_latency_seconds_count", deliveries - choices)

    def seated(self, kind: str, choices: int = 1) -> None:
        self.add("strata_reuse_total", choices, kind=kind)

    async def whole(self, body: dict[str, Any], *kinds: str, path: str = COMPLETIONS) -> str:
        """An answer in one piece; its text. ``kinds``: where each choice's history comes from. Each token is a delivery, without drafts."""
        answer = await self.address.post(path, body)
        self.http(path, 200)
        choices, timings = answer["choices"], answer["timings"]
        (reason,) = {choice["finish_reason"] for choice in choices}
        generated = answer["usage"]["completion_tokens"]
        assert timings["draft_n"] == 0
        self.ended(reason, timings["cache_n"] + timings["prompt_n"], timings["cache_n"], generated, generated, len(choices))
        assert (kinds[0] == "none") == (answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0) and len(kinds) == len(choices)
        for kind in kinds:
            self.seated(kind)
        return str(choices[0].get("text") or choices[0]["message"]["content"])

    async def streamed(self, body: dict[str, Any], kind: str, path: str = COMPLETIONS) -> None:
        """A stream to its end, drafts included."""
        call = await self.address.call("POST", path, {**body, "stream": True, "return_token_ids": True})
        sizes, last = [], {}
        while (event := await call.event()) is not None:
            last = event
            sizes += [len(choice["token_ids"]) for choice in event["choices"] if choice.get("token_ids")]
        self.http(path, 200)
        timings = last["timings"]
        reason = last["choices"][0]["finish_reason"]
        self.ended(reason, timings["cache_n"] + timings["prompt_n"], timings["cache_n"], sum(sizes), len(sizes))
        self.seated(kind)
        self.add("vllm:spec_decode_num_draft_tokens_total", timings["draft_n"])
        self.add("vllm:spec_decode_num_accepted_tokens_total", timings["draft_n_accepted"])
        assert sum(sizes) - len(sizes) == timings["draft_n_accepted"], "an accepted draft is a token more in its event"
        for size in sizes:
            for place in range(size - 1):
                self.add("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=place)

    async def left(self, body: dict[str, Any], tokens_seen: int = 0, chunks_seen: int = 99) -> None:
        """A client that leaves when it has seen so many tokens, or so many chunks of its prompt being read."""
        self.engine.is_free = False
        call = await self.address.open("POST", COMPLETIONS, {
            **body, "stream": True, "return_token_ids": True, "return_progress": True, "max_tokens": 50,
        })
        await call.answered()
        progress = (await call.event())["prompt_progress"]
        seen = chunks = 0
        while chunks < chunks_seen and seen < tokens_seen or not chunks:
            self.engine.step()
            if progress["processed"] < progress["total"]:
                progress = (await call.event())["prompt_progress"]
                chunks += 1
            if progress["processed"] == progress["total"]:
                seen += len((await call.event())["choices"][0]["token_ids"])
        call.leave()
        await self.until(lambda view: view.running == 0)
        self.engine.is_free = True
        await self.until(lambda view: all(slot.state in ("empty", "held") for slot in view.slots))
        self.http(COMPLETIONS, 200)
        self.ended("abort", progress["processed"], progress["cache"], seen, seen)
        self.seated("borrowed" if progress["cache"] else "none")

    async def broken(self, body: dict[str, Any], error: str, code: object) -> None:
        """A request whose first window fails: its own row (``error``), or the whole window."""
        self.engine.is_free = False
        call = await self.address.open("POST", COMPLETIONS, body)
        await self.until(lambda view: bool(self.engine.windows))
        if error:
            self.engine.step(error)
            self.add("vllm:corrupted_requests_total")
        else:
            self.engine.fail("stage 0: lost")
        self.engine.is_free = True
        await call.answered()
        assert (call.status, (await call.json())["error"]["code"]) == (500, code)
        self.http(COMPLETIONS, 500)
        self.ended("error", 0, 0, 0, 0)
        self.seated("none")
        self.add("strata_refused_total", reason="engine")

    async def refused(self, path: str, body: dict[str, Any], status: int, reason: str) -> None:
        call = await self.address.call("POST", path, body)
        assert call.status == status, await call.read()
        self.http(path if path != "/nosuch" else "other", status)
        self.add("strata_refused_total", reason=reason)

    async def a_full_queue(self) -> None:
        """One has the slot and reads on, one waits for it until its client leaves, one is not even let in."""
        self.engine.is_free = False
        pinned = {"prompt": "who has the seat", "id_slot": 60, "max_tokens": 9}
        first = await self.address.open("POST", COMPLETIONS, pinned)
        await self.until(lambda view: view.running == 1)
        waiting = await self.address.open("POST", COMPLETIONS, {**pinned, "prompt": "who waits"})
        await self.until(lambda view: view.waiting == 1)
        await self.refused(COMPLETIONS, {**pinned, "prompt": "who is sent away"}, 503, "queue_full")
        waiting.leave()
        await self.until(lambda view: view.waiting == 0)
        self.http(COMPLETIONS, 0)
        self.ended("abort", 0, 0, 0, 0)
        self.engine.is_free = True
        timings = (await (await first.answered()).json())["timings"]
        self.http(COMPLETIONS, 200)
        self.ended("length", timings["prompt_n"], timings["cache_n"], 9, 9)
        self.seated("none")

    async def until(self, condition: Any) -> None:
        while not condition(self.world.manager.view()):
            await asyncio.sleep(0)

    def close(self) -> None:
        """What only the engine has seen: windows and their rows."""
        decode = [window for window in self.engine.seen if window.kind == "decode"]
        prompt = [window for window in self.engine.seen if window.kind == "prompt"]
        self.add("strata_decode_windows_total", len(decode))
        self.add("strata_decode_rows_total", sum(len(segment.tokens) for window in decode for segment in window.segments))
        self.add("strata_chunks_total", len(prompt))
        self.add("strata_chunk_tokens_total", sum(len(segment.tokens) for window in prompt for segment in window.segments))
        checked = [segment.num_drafts for window in decode for segment in window.segments if segment.num_drafts]
        self.add("vllm:spec_decode_num_drafts_total", len(checked))
        for source in ("mtp", "lookup"):
            self.add("strata_draft_tokens_total", self.engine.checked[source], source=source)
            self.add("strata_draft_accepted_tokens_total", self.engine.right[source], source=source)
        assert sum(checked) == self.counts["vllm:spec_decode_num_draft_tokens_total"] > 20


def series(name: str, labels: dict[str, object]) -> str:
    return name + "".join(f",{key}={value}" for key, value in sorted(labels.items()))


@asynccontextmanager
async def kept() -> AsyncIterator[Books]:
    """A server with a seat for each conversation, which one request may wait for."""
    engine = Engine()
    world = World(settings=Settings(batch=64), engine=engine, policy=SlotPolicy(slots=64, queue_limit=1))
    listener = Listener(world.routes, Limits())
    await listener.start("127.0.0.1", 0)
    running = asyncio.ensure_future(engine.run())
    try:
        with Address(f"http://127.0.0.1:{listener.address[1]}") as address:
            yield Books(address, world, engine)
    finally:
        running.cancel()
        await listener.close()


async def the_script(books: Books) -> None:
    text = ""
    for n in range(6):
        text = await books.whole({"prompt": f"{n} is a number that", "max_tokens": 5 + n}, "none")
    await books.whole({"prompt": "5 is a number that" + text + " and", "max_tokens": 7}, "continued")
    for n in range(4):
        await books.streamed({"prompt": f"{DRAFTED}{n} say it:", "max_tokens": 12 + 7 * n}, "none")
    for n in range(3):
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": f"{n}, please"}], "max_tokens": 6}
        reply = await books.whole(chat, "none", path=CHAT)
        turns = [*chat["messages"], {"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
        await books.whole({"messages": turns, "max_tokens": 4}, "continued", path=CHAT)
    await books.whole({"prompt": "answered twice, and read once, as far as whole pages go", "max_tokens": 5, "n": 2}, "none", "borrowed")
    for n in range(3):
        await books.whole({"prompt": f"{n} with a stop", "max_tokens": 40, "stop": "brown"}, "none")
    for n in range(3):
        await books.whole({"prompt": f"{n} to its end", "max_tokens": 200}, "none")
    await books.left({"prompt": "leaves while it is answered"}, tokens_seen=3)
    await books.left({"prompt": "leaves, too"}, tokens_seen=1)
    await books.left({"prompt": "gone before all of it is read " * 5}, tokens_seen=9, chunks_seen=2)
    await books.broken({"prompt": "no numbers"}, "not finite", "not_finite")
    await books.broken({"prompt": "no window"}, "", 500)
    await books.a_full_queue()
    await books.refused(COMPLETIONS, {"prompt": "too long" * 50}, 400, "context")
    await books.refused(COMPLETIONS, {"prompt": 5}, 400, "other")
    await books.refused(CHAT, {"messages": []}, 400, "other")
    await books.refused("/nosuch", {}, 404, "other")
    for prompt in ("two more", "one more", "a longer one: " + "x" * 60, "and the last"):
        await books.streamed({"prompt": prompt, "max_tokens": 3}, "none")


async def test_every_counter_and_histogram_is_what_the_client_saw() -> None:
    async with kept() as books:
        await the_script(books)
        assert books.requests == 40
        books.close()
        found = series_of(await (await books.address.call("GET", "/metrics")).read())
    expected = dict(books.counts)
    for each in METRICS:
        if each.kind == "gauge" or each.name in NOT_OF_REQUESTS:
            continue
        names = [f"{each.name}_total"] if each.kind == "counter" else [f"{each.name}_count"]
        names += [f"{each.name}_sum"] if each.unit == "tokens" and each.kind == "histogram" else []
        mine = {name: value for name, value in found.items() if name.split(",")[0] in names}
        assert mine, each.name
        for name, value in mine.items():
            assert value == expected.pop(name, 0), name
    assert expected == {}, "all that the client saw is counted somewhere"


def series_of(exposition: bytes) -> dict[str, float]:
    """Value by name and labels, without the constant ones."""
    found = {}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine", "le")}
            found[series(sample.name, labels)] = sample.value
    return found
