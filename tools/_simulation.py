"""A virtual world for the slot machine: a clock that jumps, and an engine of stages that only takes time.

The machine in it is the production object; nothing of it is copied or changed. What is modelled: a stage works on one window at a
time, first come first served; a decode window takes ``fixed + per_row * rows`` seconds per stage, a chunk ``chunk_fixed + per_token *
tokens``; the way to the next stage takes ``hop``; and before a stage starts, the one host that all stages share (launches, experts on
the CPU) is busy for ``host + host_per_row * rows`` seconds, pad rows not counted there: they are always the same token. Where somebody
drafts, each step of the model's head takes ``head`` seconds of the last stage; drafts are rows like others.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strata.messages import (  # noqa: E402
    Cancelled, CopyDone, DraftLimits, DraftSource, EngineFacts, Failed, Finished, NewTokens, PageCopy, RequestEvent,
    Segment, SegmentResult, Terminal, Tokens, Window, WindowDone,
)
from strata.request import Request  # noqa: E402
from strata.slots import SlotMachine, SlotPolicy  # noqa: E402
from strata.slots.events import Arrive, Event, Trace  # noqa: E402


@dataclass(frozen=True)
class Costs:
    """Seconds. ``per_token`` and ``chunk_fixed`` are of prompt chunks, ``copy`` of one page to or from host memory."""

    fixed: float
    per_row: float
    hop: float = 0.0
    host: float = 0.0
    host_per_row: float = 0.0
    chunk_fixed: float = 0.0
    per_token: float = 0.0
    copy: float = 0.0
    head: float = 0.0

    def stage_seconds(self, window: Window, stage: int) -> float:
        """The stages are alike here."""
        rows = sum(len(segment.tokens) for segment in window.segments)
        return self.fixed + self.per_row * rows if window.kind == "decode" else self.chunk_fixed + self.per_token * rows

    def host_seconds(self, window: Window) -> float:
        return self.host + self.host_per_row * sum(len(segment.tokens) for segment in window.segments if segment.request_id)

    def draft_seconds(self, results: tuple[SegmentResult, ...]) -> float:
        """All slots' drafts are made together; a lookup costs nothing."""
        return self.head * max((len(one.drafts) for one in results if one.draft_source == "mtp"), default=0)


class Clock:
    """Time, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._order), what))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._agenda:
            self.now, _, what = heapq.heappop(self._agenda)
            what()


class Stages:
    """The pipeline: windows move from stage to stage; a stage and the host each do one thing at a time."""

    def __init__(self, clock: Clock, costs: Costs, num_stages: int, done: Callable[[Window], None]) -> None:
        self.clock = clock
        self.costs = costs
        self.done = done
        self.results: dict[int, tuple[SegmentResult, ...]] = {}
        self.waiting: list[deque[Window]] = [deque() for _ in range(num_stages)]
        self.is_busy = [False] * num_stages
        self.host_waiting: deque[tuple[int, Window]] = deque()
        self.host_is_busy = False
        self.busy_seconds = 0.0

    def enter(self, window: Window, stage: int = 0) -> None:
        self.waiting[stage].append(window)
        self._start(stage)

    def _start(self, stage: int) -> None:
        if self.is_busy[stage] or not self.waiting[stage]:
            return
        self.is_busy[stage] = True
        self.host_waiting.append((stage, self.waiting[stage].popleft()))
        self._ask_host()

    def _ask_host(self) -> None:
        if self.host_is_busy or not self.host_waiting:
            return
        self.host_is_busy = True
        stage, window = self.host_waiting.popleft()
        self.clock.after(self.costs.host_seconds(window), lambda: self._launched(stage, window))

    def _launched(self, stage: int, window: Window) -> None:
        self.host_is_busy = False
        self._ask_host()
        seconds = self.costs.stage_seconds(window, stage)
        if stage == len(self.waiting) - 1:
            seconds += self.costs.draft_seconds(self.results[window.id])
        self.busy_seconds += seconds
        self.clock.after(seconds, lambda: self._finished(stage, window))

    def _finished(self, stage: int, window: Window) -> None:
        self.is_busy[stage] = False
        self._start(stage)
        if stage + 1 < len(self.waiting):
            self.clock.after(self.costs.hop, lambda: self.enter(window, stage + 1))
        else:
            self.done(window)


@dataclass
class Outcome:
    """One request as its client saw it. ``token``: what the engine answers, given the number of the token in the answer."""

    request: Request
    token: Callable[[int], int]
    sent: float
    on_end: Callable[[Outcome], None]
    tokens: list[int] = field(default_factory=list)
    first: float | None = None
    end: Terminal | None = None
    finished: float = 0.0


Drafter = Callable[[Outcome, int, DraftLimits], tuple[Tokens, DraftSource]]
"""Drafts for the tokens of an answer from a number on, as many as are wanted."""


class World:
    """A machine, its stages, and clients' requests, on one virtual clock."""

    def __init__(self, facts: EngineFacts, policy: SlotPolicy, costs: Costs, drafter: Drafter | None = None) -> None:
        self.clock = Clock()
        self.costs = costs
        self.drafter = drafter
        self.machine = SlotMachine(facts, policy)
        self.stages = Stages(self.clock, costs, facts.num_stages, self._window_done)
        self.requests: dict[str, Outcome] = {}
        self.rows = 0

    def ask(self, request: Request, token: Callable[[int], int], on_end: Callable[[Outcome], None]) -> None:
        self.requests[request.id] = Outcome(request, token, self.clock.now, on_end)
        self.feed(Arrive(request))

    def feed(self, event: Event) -> None:
        for command in self.machine.receive(event, self.clock.now):
            if isinstance(command, Window):
                self.rows += sum(len(segment.tokens) for segment in command.segments) if command.kind == "decode" else 0
                self.stages.results[command.id] = tuple(self._result(segment) for segment in command.segments)
                self.stages.enter(command)
            elif isinstance(command, PageCopy):
                self._copy(command)
            elif not isinstance(command, Trace):
                self._tell(command)

    def _copy(self, copy: PageCopy) -> None:
        if copy.direction != "drop":
            self.clock.after(self.costs.copy * len(copy.pages), lambda: self.feed(CopyDone(copy.id)))

    def _window_done(self, window: Window) -> None:
        results = self.stages.results.pop(window.id)
        drafting = self.costs.draft_seconds(results)
        *others, last = (self.costs.stage_seconds(window, stage) for stage in range(len(self.stages.waiting)))
        stages = (*others, last + drafting)
        self.feed(WindowDone(window.id, results, sum(stages), stages, drafting))

    def _result(self, segment: Segment) -> SegmentResult:
        """What the window will report: an answer has one decode window in flight, so it is known when that is sent."""
        if segment.sampling is None:
            return SegmentResult()
        outcome = self.requests.get(segment.request_id)
        if outcome is None:
            return SegmentResult((0,))
        first, count = len(outcome.tokens), segment.num_drafts
        picks = tuple(outcome.token(number) for number in range(first, first + count + 1))
        drafts = segment.tokens[len(segment.tokens) - count:]
        accepted = next((place for place, draft in enumerate(drafts) if draft != picks[place]), count)
        picks = picks[:accepted + 1]
        limits = segment.draft_limits
        if self.drafter is None or not (limits.mtp or limits.lookup):
            return SegmentResult(picks, accepted)
        more, source = self.drafter(outcome, first + accepted + 1, limits)
        return SegmentResult(picks, accepted, drafts=more, draft_source=source)

    def _tell(self, event: RequestEvent) -> None:
        outcome = self.requests[event.request_id]
        if isinstance(event, NewTokens):
            outcome.tokens += event.tokens
            outcome.first = self.clock.now if outcome.first is None else outcome.first
        elif isinstance(event, (Finished, Failed, Cancelled)):
            del self.requests[event.request_id]
            outcome.end, outcome.finished = event, self.clock.now
            # The client hears of it after the machine has finished its turn.
            self.clock.after(0.0, lambda: outcome.on_end(outcome))
