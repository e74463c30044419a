"""Random histories against the machine: arrivals, next turns, cancels, stops, failures, slow copies, drains, and drafts of any quality.

The fake engine makes every token depend on all that was written to the cache, so "the answer equals a cold run" is checked for every
request under every interleaving, and the books are checked after every event. A cold run has no drafts: they change nothing.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from strata.errors import ClientError, Draining, EngineError, QueueFull
from strata.messages import CopyDone, DraftSource, EngineFailed, Failed, Finished, SegmentResult, Usage, WindowDone
from strata.request import Placement
from strata.slots.events import Abort, Cancel, Drain, Stop, Tick
from strata.slots.policy import SlotPolicy
from tests.slots.drafters import greedy_engine, mixed, right_for
from tests.slots.fake_engine import Drafter, expected
from tests.slots.house import House

BEGINNINGS = [(), (1,), (7,) * 3, (2, 4, 6, 8), tuple(range(17)), tuple(range(40)), tuple(range(17)) + (9,) * 9]
policies = st.builds(
    SlotPolicy,
    slots=st.just(4), groups=st.sampled_from([0, 1, 2, 4]), rows=st.sampled_from(["compact", "prefix"]), shelf=st.booleans(),
    decode_share=st.sampled_from([0.0, 0.5]), max_overtaken=st.sampled_from([1, 4]), queue_limit=st.sampled_from([1, 3, 64]),
    queue_timeout=st.sampled_from([0.0, 3.0]), expire_s=st.sampled_from([0.0, 2.0]), cache_bytes=st.sampled_from([0, 6000, 100_000]),
    shelf_limit=st.sampled_from([2, 512]), low_first=st.booleans(), chunk=st.sampled_from([0, 4, 12]),
)
placements = st.builds(
    Placement, slot=st.sampled_from([None, None, 0, 3]), key=st.sampled_from(["", "", "k", "l"]),
    tenant=st.sampled_from(["", "", "t"]), reuse=st.sampled_from([True, True, False]), keep=st.sampled_from([True, True, True, False]),
)
drafters = st.one_of(
    st.builds(mixed, st.integers(0, 1 << 20)), st.builds(right_for, st.sampled_from([0, 1, 9]), st.sampled_from(["mtp", "lookup"])),
    st.just(greedy_engine),
)


class Histories(RuleBasedStateMachine):
    house: House

    @initialize(
        policy=policies, pages=st.sampled_from([14, 20, 64]), stages=st.sampled_from([1, 2]), every=st.sampled_from([0, 0, 8]),
        eager=st.booleans(), rows=st.sampled_from([2, 8]), grid=st.sampled_from([1, 4, 8]), most=st.sampled_from([0, 1, 3, 7]),
        drafter=drafters, sources=st.sampled_from([("lookup",), ("mtp", "lookup")]),
        costs=st.sampled_from([None, (0.01, 0.01), (1.0, 0.3)]),
    )
    def build(
        self, policy: SlotPolicy, pages: int, stages: int, every: int, eager: bool, rows: int, grid: int, most: int, drafter: Drafter,
        sources: tuple[DraftSource, ...], costs: tuple[float, float] | None,
    ) -> None:
        if policy.rows == "prefix":
            rows = 8
        self.house = House(
            policy, every, eager, drafter, num_pages=pages, num_stages=stages, snapshots=bool(every), max_rows=rows, prompt_grid=grid,
            context=60, max_drafts=most, draft_sources=sources if most else (),
        )
        if costs is not None:
            per_row, per_draft = costs
            self.house.engine.costs = lambda rows, drafts: (0.1 + per_row * rows, per_draft * drafts)
        self.names: list[str] = []
        self.stopped: set[str] = set()
        self.hurt: set[str] = set()
        self.aborted: list[Usage] = []

    def _ask(self, prompt: tuple[int, ...], max_tokens: int, placement: Placement, mark: bool, stops: bool, logprobs: bool) -> None:
        name = f"r{len(self.names)}"
        marks = (max(1, len(prompt) - 2),) if mark else ()
        more = {"stop_tokens": frozenset(range(5))} if stops else {}
        try:
            self.house.ask(name, prompt, max_tokens, marks, placement, prompt_logprobs=0 if logprobs else -1, **more)
        except (QueueFull, Draining, ClientError):
            self.house.machine.check_integrity()
            return
        self.names.append(name)

    @rule(
        beginning=st.sampled_from(BEGINNINGS), rest=st.lists(st.integers(0, 3), min_size=1, max_size=12), max_tokens=st.integers(0, 12),
        placement=placements, mark=st.booleans(), stops=st.booleans(), logprobs=st.sampled_from([False, False, True]),
    )
    def arrive(self, beginning, rest, max_tokens, placement, mark, stops, logprobs):  # type: ignore[no-untyped-def]
        self._ask(beginning + tuple(rest), max_tokens, placement, mark, stops, logprobs)

    @precondition(lambda self: self.names)
    @rule(
        which=st.integers(0, 5), keep=st.sampled_from([None, None, -1, -2, 0]), rest=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        max_tokens=st.integers(1, 8), mark=st.booleans(),
    )
    def next_turn(self, which, keep, rest, max_tokens, mark):  # type: ignore[no-untyped-def]
        name = self.names[-1 - which % len(self.names)]
        old = self.house.requests[name]
        answer = tuple(self.house.tokens.get(name, ()))[:keep]
        self._ask(old.prompt + answer + tuple(rest), max_tokens, old.placement, mark, False, False)

    @precondition(lambda self: self.house.engine.windows)
    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0]))
    def land_window(self, seconds: float) -> None:
        self.house.land_window(seconds)

    @precondition(lambda self: self.house.engine.copies)
    @rule()
    def land_copy(self) -> None:
        self.house.send(self.house.engine.land_copy())

    @precondition(lambda self: self.house.engine.copies)
    @rule()
    def fail_copy(self) -> None:
        done = self.house.engine.land_copy()
        self.house.send(CopyDone(done.copy_id, "no memory"))

    @precondition(lambda self: self.house.engine.windows)
    @rule()
    def fail_window(self) -> None:
        window = self.house.engine.lose_window()
        self.hurt |= {segment.request_id for segment in window.segments}
        self.house.send(EngineFailed("stage 0: out of luck", (window.id,)))

    @precondition(lambda self: self.house.engine.windows)
    @rule(row=st.integers(0, 7))
    def fail_row(self, row: int) -> None:
        window = self.house.engine.windows[0]
        row %= len(window.segments)
        done = self.house.engine.land_window()
        results = list(done.results)
        if window.segments[row].request_id:
            results[row] = SegmentResult(error="NaN")
            self.hurt.add(window.segments[row].request_id)
            self.house.engine.lose_row(window.segments[row].request_id)
        self.house.send(WindowDone(done.window_id, tuple(results)))

    @precondition(lambda self: self.names)
    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        self.house.send(Cancel(self.names[-1 - which % len(self.names)]))

    @precondition(lambda self: self.names)
    @rule(which=st.integers(0, 5))
    def stop(self, which: int) -> None:
        name = self.names[-1 - which % len(self.names)]
        if name not in self.house.ended:
            self.stopped.add(name)
        self.house.send(Stop(name))

    @rule(seconds=st.sampled_from([0.5, 4.0]), free=st.sampled_from([None, 0, 10 << 30]))
    def wait(self, seconds: float, free: int | None) -> None:
        self.house.now += seconds
        self.house.send(Tick(free))

    def teardown(self) -> None:
        if not hasattr(self, "house"):
            return
        self.house.run()
        assert self.house.machine.is_idle, f"{self.house.states()} {[run.request.id for run in self.house.machine.desk.queue]}"
        for name in self.names:
            self._check(name)
        self._check_accounts()
        free = self.house.machine.memory
        assert free.freeing == 0 and not free.transfers

    def _check_accounts(self) -> None:
        counters = self.house.machine.counters
        usages = [terminal.usage for terminal in self.house.ended.values()] + self.aborted
        assert sum(usage.generated for usage in usages) == counters.generated_tokens
        assert sum(usage.drafted for usage in usages) == sum(counters.drafted.values())
        assert sum(usage.accepted for usage in usages) == sum(counters.accepted.values()) == sum(counters.accepted_at)
        assert counters.accepted_at == sorted(counters.accepted_at, reverse=True)
        assert all(usage.accepted <= min(usage.drafted, usage.generated) for usage in usages)
        assert self.house.facts.max_drafts or not (counters.drafts or sum(counters.drafted.values()))

    def _check(self, name: str) -> None:
        house, request, terminal = self.house, self.house.requests[name], self.house.ended[name]
        answer = house.tokens.get(name, [])
        right = expected(request, 200)
        assert answer == right[:len(answer)], f"{name}: {answer} is not {right}"
        if isinstance(terminal, Finished) and name not in self.stopped:
            pool = house.machine.memory.num_usable * house.facts.page_tokens
            full = terminal.reason == "stop" or len(answer) == len(right) or len(request.prompt) + len(answer) >= pool
            assert full, f"{name} ended with {terminal} after {len(answer)} of {len(right)} tokens"
        if isinstance(terminal, Failed):
            assert (isinstance(terminal.error, EngineError) and name in self.hurt) or isinstance(terminal.error, QueueFull)
        if request.prompt_logprobs >= 0 and isinstance(terminal, Finished) and name not in self.stopped:
            assert house.logprobs.get(name, []) == list(request.prompt[1:])

    @rule()
    @precondition(lambda self: len(self.names) > 8)
    def drain(self) -> None:
        self.house.send(Drain())

    @rule()
    @precondition(lambda self: len(self.names) > 9)
    def abort(self) -> None:
        for name in self.names:
            if name not in self.house.ended:
                self.stopped.add(name)
        before = set(self.house.ended)
        self.house.send(Abort("down"))
        for name in set(self.house.ended) - before:
            assert isinstance(self.house.error(name), Draining)
            self.aborted.append(self.house.ended[name].usage)
            del self.house.ended[name]
            self.names.remove(name)


Histories.TestCase.settings = settings(max_examples=80, stateful_step_count=60)
TestHistories = Histories.TestCase
