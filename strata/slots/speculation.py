"""Asks for drafts, and fits what came into the next windows; learns from how they fare.

Rules. A draft is a guess: it is dropped wherever it is in the way. It never reaches beyond the answer's limit or the context; it takes a
row only where every slot of the window has its own, and rows that are short are shared out evenly; it takes a page only if each
slot could still get its next one, and gives it back when somebody lacks one. A request that loses its seat drops its drafts.
How many are wanted is chosen (drafting.py) every few windows, and whenever other slots decode together. Until windows of two sizes were
measured, a row is taken to cost what it often does, and every other choice is to have no drafts, which measures that. Where drafts
lose, now and then a slot tries some all the same, or nobody would see them become good again. All this goes by counts of windows: no
clock, nothing drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strata.messages import NO_DRAFTS, DraftLimits, Segment, WindowDone
from strata.slots.curve import Curve, straight
from strata.slots.drafting import (
    FIRST_GUESS, Chance, Cost, Prospect, Tally, choose, server_chances, share_rows, slot_chances, window_cost,
)
from strata.slots.drafts import Drafts, Outcome
from strata.slots.grouping import StageTimes
from strata.slots.memory import Memory
from strata.slots.slot import Run
from strata.slots.states import RequestState

PERIOD = 8
"""Decode windows of a group after which its slots' drafts are chosen anew."""
SLOT_MEMORY = 0.8
"""What a slot's counts keep from one choice to the next."""
SERVER_MEMORY = 512
"""Windows that the server's counts remember: of a slot that asked a source, or of all slots where they did not."""
TRIED = 64
"""Windows that asked a source, as far as they are remembered, after which its chances count as seen."""
PROBE = 61
"""Choices against a source after which one slot tries it until the next choice."""
PROBE_DRAFTS = 2
MEMORY = 32
"""Decode windows that the averages of rows and of drafting time follow."""
UNKNOWN = (0.95, 0.05)
"""What a window costs before it was measured, in relation: the fixed part and a row's."""
NEW_STEPS = 3
"""A head is asked for so many steps more than were measured at most: a fresh one seems right for ever."""
STEP_SHARE = 0.07
"""A step of the head that was never measured, as a share of a window of one row."""


class Schedule:
    """When a group's drafts are chosen next. ``slots``: how many the last choice was for. ``left``: windows until the next."""

    __slots__ = ("slots", "left")

    def __init__(self) -> None:
        self.slots = self.left = 0

    def is_due(self, runs: Sequence[Run]) -> bool:
        self.left -= 1
        return self.left < 0 or self.slots != len(runs)


class Speculation:
    """Owner of what is known about drafts. ``times``: seconds of a decode window without its drafting, by rows.

    ``mean_rows``: rows that a slot has in a decode window. ``mean_seconds``: of drafting in one.
    """

    def __init__(self, memory: Memory, num_slots: int, times: StageTimes) -> None:
        self.memory = memory
        self.depth = memory.facts.max_drafts
        self.times = times
        self.steps = StageTimes()
        self.mean_rows = 1.0
        self.mean_seconds = 0.0
        self._num_slots = num_slots
        self._server = {source: Tally(self.depth) for source in ("mtp", "lookup")}
        self._fresh: list[Outcome] = []
        self._against = {"mtp": 0, "lookup": 0}
        self._tries = 0
        self._turn = 0
        memory.counters.accepted_at = [0] * self.depth

    # ---- before a window

    def prepare(self, schedule: Schedule, runs: Sequence[Run], rows: int, windows: int) -> None:
        """Choose if it is time, and cut what each of ``runs`` carries to what their next window can check.

        ``rows``: of the window without drafts. ``windows``: decode windows that share the pipeline.
        """
        if schedule.is_due(runs):
            self.choose(schedule, runs, rows, windows)
        fitting = [self._fitting(run) for run in runs]
        spare = self.memory.facts.max_rows - rows
        if sum(fitting) > spare:
            self._turn += 1
            fitting = share_rows(fitting, spare, self._turn % len(fitting))
        for run, count in zip(runs, fitting):
            _drafts(run).offer(count)

    def limits(self, run: Run) -> DraftLimits:
        """What the window that is being built for ``run`` is asked for: nothing that could not be delivered behind its own token."""
        wanted = _drafts(run).wanted or NO_DRAFTS
        room = run.limit - len(run.generated) - 2
        if wanted.mtp > room or wanted.lookup > room:
            return DraftLimits(max(0, min(wanted.mtp, room)), max(0, min(wanted.lookup, room)))
        return wanted

    def _fitting(self, run: Run) -> int:
        """Drafts that the limit leaves room for, and that have a page or get one which nobody will lack."""
        count = len(_drafts(run).tokens)
        if not count:
            return 0
        count = min(count, run.limit - len(run.generated) - 1)
        memory, conversation = self.memory, run.conversation
        assert conversation is not None
        pages = len(conversation.pages)
        missing = memory.pages_for(run.submitted + 1 + count) - pages
        if missing <= 0:
            return count
        if memory.pages.num_free - missing >= self._num_slots:
            conversation.add_pages(memory.pages.allocate(missing))
            return count
        return pages * memory.facts.page_tokens - run.submitted - 1

    def give_back(self, runs: Sequence[Run]) -> bool:
        """Take from ``runs``, which are not in flight, the pages that only drafts wanted. True: some page is free now."""
        memory = self.memory
        for run in runs:
            assert run.conversation is not None
            memory.pages.release(run.conversation.cut(run.submitted + 1, memory.facts.page_tokens))
        return memory.pages.num_free > 0

    # ---- the choice

    def choose(self, schedule: Schedule, runs: Sequence[Run], rows: int, windows: int) -> None:
        """For ``runs``, which decode together from now on."""
        self._learn()
        factor = SLOT_MEMORY ** (1 - (schedule.left + 1) / PERIOD)
        schedule.slots, schedule.left = len(runs), PERIOD - 1
        for run in runs:
            run.drafts = run.drafts or Drafts(self.depth)
            run.drafts.fade(factor)
        depth = min(self.depth, -(-max(0, self.memory.facts.max_rows - rows) // len(runs)))
        sources = self.memory.facts.draft_sources
        steps = min(depth, max(self.steps.measured(), default=0) + NEW_STEPS)
        most = DraftLimits(steps if "mtp" in sources else 0, depth if "lookup" in sources else 0)
        curves = self._curves(rows)
        limits = [NO_DRAFTS] * len(runs)
        if curves:
            limits = self._best(runs, most, window_cost(curves, windows, self.times.between, self._step_seconds(curves)))
        for run, limit in zip(runs, limits):
            _drafts(run).wanted = limit

    def _curves(self, rows: int) -> Sequence[Curve]:
        """Of each stage, the seconds of a window by its rows; nothing where a window without drafts is to be measured first."""
        curves = self.times.curves()
        if curves is not None:
            return curves
        known = self.times.measured()
        if self.times.windows and rows not in known:
            self._tries += 1
            if self._tries % 2 == 0:
                return ()
        fixed, per_row = UNKNOWN
        for size, stages in known.items():
            whole = fixed + per_row * size
            return [straight(seconds * fixed / whole, seconds * per_row / whole) for seconds in stages]
        return (straight(*UNKNOWN),)

    def _step_seconds(self, curves: Sequence[Curve]) -> list[float]:
        """Where 0, 1, 2, ... steps of the head are wanted, of which it takes as many as are worth it; more never take less time."""
        known = self.steps.measured()
        unit = STEP_SHARE * sum(curve.at(1) for curve in curves)
        if len(known) == 1:
            (steps, (seconds,)), = known.items()
            unit = seconds / steps
        result = [0.0]
        for step in range(1, self.depth + 1):
            measured = self.steps.seconds(step)
            result.append(max(result[-1], unit * step if measured is None else measured[0]))
        return result

    def _best(self, runs: Sequence[Run], most: DraftLimits, cost: Cost) -> list[DraftLimits]:
        mtp, lookup = (server_chances(self._server[source], FIRST_GUESS[source]) for source in ("mtp", "lookup"))
        prospects = [self._prospect(run, most, mtp, lookup) for run in runs]
        tried = (sum(self._server[source].asked) for source in self.memory.facts.draft_sources)
        limits = choose(prospects, cost, min(tried, default=0.0) >= TRIED)
        for source in self._against:
            self._probe(source, prospects, limits)
        return limits

    def _probe(self, source: str, prospects: Sequence[Prospect], limits: list[DraftLimits]) -> None:
        """Where a source is unwanted, it is counted, and some time tried; the slots take turns."""
        places = [place for place, slot in enumerate(prospects) if getattr(slot, source) and not getattr(limits[place], source)]
        if places:
            self._against[source] += 1
            turn, rest = divmod(self._against[source], PROBE)
            if not rest:
                place = places[turn % len(places)]
                depth = min(PROBE_DRAFTS, len(getattr(prospects[place], source)))
                limits[place] = replace(limits[place], **{source: depth})

    def _prospect(self, run: Run, most: DraftLimits, mtp: Sequence[Chance], lookup: Sequence[Chance]) -> Prospect:
        drafts, room = _drafts(run), max(0, run.limit - len(run.generated) - 1)
        return Prospect(slot_chances(drafts.mtp, mtp, min(most.mtp, room)), slot_chances(drafts.lookup, lookup, min(most.lookup, room)))

    def _learn(self) -> None:
        if not self._fresh:
            return
        slots = len({id(drafts) for drafts, *_ in self._fresh})
        for source, tally in self._server.items():
            asked = sum(getattr(outcome[2], source) > 0 for outcome in self._fresh)
            tally.fade(max(0.0, 1 - (asked + (len(self._fresh) - asked) / slots) / SERVER_MEMORY))
        for drafts, source, asked, given, checked, accepted in self._fresh:
            if asked.lookup:
                found = (given, checked, accepted) if source == "lookup" else (0, 0, 0)
                drafts.lookup.add(asked.lookup, *found)
                self._server["lookup"].add(asked.lookup, *found)
            if asked.mtp and source != "lookup":  # the head is asked only where the lookup found nothing
                drafts.mtp.add(asked.mtp, given, checked, accepted)
                self._server["mtp"].add(asked.mtp, given, checked, accepted)
        self._fresh.clear()

    # ---- after a window

    def landed(self, runs: Sequence[Run | None], segments: Sequence[Segment], event: WindowDone, is_decode: bool) -> None:
        """What a window says about the drafts that it checked, and what it brings for the next one."""
        steps = rows = slots = 0
        for run, segment, result in zip(runs, segments, event.results):
            if run is None:
                continue
            rows += len(segment.tokens)
            slots += 1
            asked = segment.draft_limits
            if asked.mtp and result.draft_source != "lookup":
                steps = max(steps, asked.mtp)
            if run.drafts is None or segment.sampling is None:
                continue
            if result.error or run.state is not RequestState.SEATED:
                run.drafts.drop()
                continue
            self._fresh.append(run.drafts.outcome(segment.num_drafts, result.accepted))
            run.drafts.carry(asked, result)
        self.memory.counters.draft_seconds += event.draft_seconds
        if is_decode and slots:
            self._measure(rows / slots, steps, event.draft_seconds)

    def _measure(self, rows: float, steps: int, seconds: float) -> None:
        self.mean_rows += (rows - self.mean_rows) / MEMORY
        self.mean_seconds += (seconds - self.mean_seconds) / MEMORY
        if steps:
            self.steps.observe(steps, (seconds,), None)


def _drafts(run: Run) -> Drafts:
    assert run.drafts is not None
    return run.drafts
