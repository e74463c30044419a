"""Builds the next windows: one decode window per group in flight, and prompt chunks between them.

Decode windows and chunks share the engine. While anybody decodes, one chunk is in flight at a time, and after it the others decode for
at least ``decode_share`` of the time the chunk took (time is work, summed over stages and groups, on either side), so the gap between
two tokens of a running answer is bounded by one chunk. With nobody decoding, or a share of 0, as many chunks are in flight as the
engine has stages. Windows hold active rows only; ``rows=prefix`` also runs a pad row for every hole below a
group's last active slot, as the original did, to reproduce its numbers. Where the number of groups is the machine's to choose, all
groups share one window whenever grouping.py finds that faster. Where the engine drafts, a slot's rows are its last token and the drafts
behind it (speculation.py).
"""

from __future__ import annotations

from strata.errors import SettingError
from strata.messages import NO_DRAFTS, DraftLimits, EngineFacts, Segment, Tokens, Window, WindowDone
from strata.request import Sampling
from strata.slots.events import Command, IllegalEvent
from strata.slots.flight import Flight, Group, check_report, conversation_of, slot_of
from strata.slots.grouping import Grouping
from strata.slots.memory import Memory
from strata.slots.policy import Reader, SlotPolicy, chunk_end, pick_reader
from strata.slots.slot import Run, Slot
from strata.slots.speculation import Speculation
from strata.slots.states import SlotState
from strata.slots.view import Counters

GREEDY = Sampling(temperature=0.0)


class Scheduler:
    """Turns seated runs into windows, appended to ``out``. Owner of everything in flight but copies."""

    def __init__(self, policy: SlotPolicy, groups: int, memory: Memory, slots: list[Slot]) -> None:
        self.facts: EngineFacts = memory.facts
        self.policy = policy
        self.memory = memory
        self.out: list[Command] = memory.out
        self.counters: Counters = memory.counters
        size = len(slots) // groups
        self.groups = [Group(number, slots[number * size:(number + 1) * size]) for number in range(groups)]
        # All slots as one group, where one window may hold them all.
        self.everybody = Group(0, slots)
        self.grouping = Grouping()
        self.speculation = Speculation(memory, len(slots), self.grouping.times) if self.facts.max_drafts else None
        self.may_join = policy.groups == 0 and groups > 1 and policy.rows == "compact" and len(slots) <= self.facts.max_rows
        if policy.rows == "prefix" and size > self.facts.max_rows:
            raise SettingError(f"rows=prefix needs groups of at most {self.facts.max_rows} slots, not {size}; raise batch_groups")
        grid = self.facts.prompt_grid
        self.chunk = max(grid, (policy.chunk or self.facts.chunk) // grid * grid)
        self.flights: dict[int, Flight] = {}
        self._chunks_in_flight = 0
        self._decode_owed = 0.0
        self._last_window = 0
        self._num_decoding = 0

    def schedule(self, now: float) -> list[Run]:
        """Send every window that may go now; returns the decoding runs that could not get their next page."""
        readers: list[Run] = []
        decoders: list[list[Run]] = []
        for group in self.groups:
            decoders.append([])
            for slot in group.slots:
                run = slot.run
                if run is None:
                    continue
                if slot.state is SlotState.DECODING:
                    decoders[-1].append(run)
                elif slot.state is SlotState.READING and run.submitted < run.total:
                    readers.append(run)
        self._num_decoding = sum(map(bool, decoders))
        starving: list[Run] = []
        if self.may_join and self._joins(decoders):
            self._num_decoding = 1
            if not any(group.window for group in self.groups):
                starving = self._decode(self.everybody, [run for runs in decoders for run in runs if not run.in_flight], now)
        else:
            for group, runs in zip(self.groups, decoders):
                if not group.window:
                    starving += self._decode(group, [run for run in runs if not run.in_flight], now)
        if readers:
            self._read(readers, any(decoders))
        return [] if starving and self._awaits_pages() else starving

    # ---- decode windows

    def _joins(self, decoders: list[list[Run]]) -> bool:
        rows, drafting = (1.0, 0.0) if self.speculation is None else (self.speculation.mean_rows, self.speculation.mean_seconds)
        return self.grouping.choose(tuple(map(len, decoders)), rows, drafting)

    def _decode(self, group: Group, ready: list[Run], now: float) -> list[Run]:
        starving = [run for run in ready if not self.memory.grow(conversation_of(run), run.submitted + 1, now)]
        if starving:
            if self.speculation is not None:
                starving = self._relieved(starving, now)
            ready = [run for run in ready if run not in starving]
        if len(ready) > self.facts.max_rows:
            ready = self._take_turns(group, ready)
        if not ready:
            return starving
        rows: list[Run | None] = list(ready)
        if self.speculation is not None:
            pads = slot_of(ready[-1]).id - group.slots[0].id + 1 - len(ready) if self.policy.rows == "prefix" else 0
            self.speculation.prepare(group.drafting, ready, len(ready) + pads, self._num_decoding)
        segments = [self._row(run) for run in ready]
        if self.policy.rows == "prefix":
            rows, segments = self._with_pads(group, ready, segments)
        number = self._send("decode", group.id, segments, rows, now)
        for sharing in self.groups if group is self.everybody else (group,):
            sharing.window = number
        self.counters.decode_windows += 1
        self.counters.decode_rows += len(ready) + sum(segment.num_drafts for segment in segments)
        return starving

    def _relieved(self, starving: list[Run], now: float) -> list[Run]:
        """Those who still starve after the pages that only drafts wanted were given back."""
        assert self.speculation is not None
        self.speculation.give_back([run for run in self._decoding() if not run.in_flight])
        return [run for run in starving if not self.memory.grow(conversation_of(run), run.submitted + 1, now)]

    def _awaits_pages(self) -> bool:
        """Whether a window in flight holds pages for drafts: when it has reported they can be had."""
        return self.speculation is not None and any(
            run.in_flight and len(conversation_of(run).pages) > self.memory.pages_for(run.submitted) for run in self._decoding()
        )

    def _decoding(self) -> list[Run]:
        return [slot.run for slot in self.everybody.slots if slot.run is not None and slot.state is SlotState.DECODING]

    def _take_turns(self, group: Group, ready: list[Run]) -> list[Run]:
        """More rows than a window holds: go round the group from where the last window stopped; rows stay in slot order."""
        first = next((place for place, run in enumerate(ready) if slot_of(run).id >= group.turn), 0)
        chosen = (ready[first:] + ready[:first])[:self.facts.max_rows]
        group.turn = slot_of(chosen[-1]).id + 1
        return sorted(chosen, key=lambda run: slot_of(run).id)

    def _row(self, run: Run) -> Segment:
        request, start, limits = run.request, run.submitted, NO_DRAFTS
        tokens: Tokens = (run.generated[-1],)
        run.submitted = start + 1
        run.in_flight += 1
        if self.speculation is not None and run.drafts is not None:
            limits = self.speculation.limits(run)
            tokens += run.drafts.tokens
        return Segment(
            request.id, slot_of(run).id, start, tokens, conversation_of(run).table(), request.sampling, len(tokens) - 1,
            _history(run, limits), draft_limits=limits,
        )

    def _with_pads(self, group: Group, ready: list[Run], segments: list[Segment]) -> tuple[list[Run | None], list[Segment]]:
        """Every slot of the group up to the last active one; holes write to a page of their own that nobody reads."""
        active = {slot_of(run).id: (run, segment) for run, segment in zip(ready, segments)}
        rows: list[Run | None] = []
        padded: list[Segment] = []
        for slot in group.slots:
            run, segment = active.get(slot.id, (None, None))
            rows.append(run)
            padded.append(segment or Segment("", slot.id, 0, (0,), (self.memory.pad_page,), GREEDY))
            if slot.id == max(active):
                break
        self.counters.pad_rows += len(rows) - len(ready)
        return rows, padded

    # ---- prompt chunks

    def _read(self, readers: list[Run], is_decoding: bool) -> None:
        limit = self.facts.num_stages
        if is_decoding and self.policy.decode_share:
            # Somebody's next token waits behind this chunk: one at a time, and only when the decoders had their share.
            owed = self._decode_owed > 0 and any(group.window for group in self.groups)
            limit = 0 if owed else 1
        while readers and self._chunks_in_flight < limit:
            rows = [Reader(run.total - run.submitted, run.order, run.overtaken) for run in readers]
            run = readers[pick_reader(rows, self.policy.max_overtaken)]
            for other in readers:
                other.overtaken += other.order < run.order
            self._send("prompt", slot_of(run).group, [self._chunk(run)], [run], None)
            self._chunks_in_flight += 1
            if run.submitted >= run.total:
                readers.remove(run)

    def _chunk(self, run: Run) -> Segment:
        request, start, total = run.request, run.submitted, run.total
        end = chunk_end(start, total, self.chunk, self.facts.prompt_grid)
        is_last, wants = end == total, request.prompt_logprobs
        picks = is_last and run.limit > 0
        run.submitted = end
        run.in_flight += 1
        self.counters.chunks += 1
        self.counters.chunk_tokens += end - start
        limits = self._first_limits(run) if picks and self.speculation is not None else NO_DRAFTS
        return Segment(
            request.id, slot_of(run).id, start, run.text(start, end), conversation_of(run).table(), request.sampling if picks else None,
            history=_history(run, limits) if picks else None,
            prompt_logprobs=wants, next_token=None if is_last or wants < 0 else run.text(end, end + 1)[0], draft_limits=limits,
        )

    def _first_limits(self, run: Run) -> DraftLimits:
        """Drafts wanted behind a prompt: as is best for all that will decode together then."""
        assert self.speculation is not None
        group = self.everybody if self.grouping.is_joined else self.groups[slot_of(run).group]
        runs = [slot.run for slot in group.slots if slot.run is run or (slot.run is not None and slot.state is SlotState.DECODING)]
        self.speculation.choose(group.drafting, [one for one in runs if one is not None], len(runs), max(1, self._num_decoding))
        return self.speculation.limits(run)

    # ---- in flight

    @property
    def num_windows(self) -> int:
        """Decode windows that all groups together have in one turn, if all have rows."""
        return 1 if self.grouping.is_joined else len(self.groups)

    def _send(self, kind: str, group: int, segments: list[Segment], runs: list[Run | None], now: float | None) -> int:
        self._last_window += 1
        window = Window(self._last_window, "decode" if kind == "decode" else "prompt", group, tuple(segments))
        self.flights[window.id] = Flight(window, runs, None if self.flights else now)
        self.out.append(window)
        return window.id

    def land(self, event: WindowDone, now: float) -> Flight:
        """Book a window that has reported. Raises ``IllegalEvent`` where it is not in flight or its results do not fit."""
        flight = self.flights.get(event.window_id)
        if flight is None:
            raise IllegalEvent(f"window {event.window_id} is not in flight")
        if len(event.results) != len(flight.runs):
            raise IllegalEvent(f"window {event.window_id} has {len(flight.runs)} segments, not {len(event.results)}")
        for run, segment, result in zip(flight.runs, flight.window.segments, event.results):
            if run is not None and not result.error:
                check_report(run, segment, result)
        self._forget(flight)
        if self.speculation is not None:
            self.speculation.landed(flight.runs, flight.window.segments, event, flight.window.kind == "decode")
        if flight.window.kind == "prompt":
            self._decode_owed = self.policy.decode_share * event.seconds
        else:
            self._decode_owed -= event.seconds
            if (self.may_join or self.speculation is not None) and event.stage_seconds:
                self._observe(flight, event, now)
        return flight

    def _observe(self, flight: Flight, event: WindowDone, now: float) -> None:
        """What the window took, without its drafting: that does not go by its rows."""
        rows = sum(len(segment.tokens) for segment in flight.window.segments)
        *stages, last = event.stage_seconds
        was_alone = flight.sent is not None and event.window_id == self._last_window
        trip = now - (flight.sent or 0.0) - event.draft_seconds if was_alone else None
        self.grouping.times.observe(rows, (*stages, last - event.draft_seconds), trip)

    def lose(self, window_ids: Tokens) -> list[Run]:
        """Windows that will not report; the runs they held, each once. Raises ``IllegalEvent`` if one is not in flight."""
        unknown = [number for number in window_ids if number not in self.flights]
        if unknown:
            raise IllegalEvent(f"windows {unknown} are not in flight")
        runs: dict[str, Run] = {}
        for number in window_ids:
            flight = self.flights[number]
            self._forget(flight)
            runs.update({run.request.id: run for run in flight.runs if run is not None})
        return list(runs.values())

    def _forget(self, flight: Flight) -> None:
        del self.flights[flight.window.id]
        if flight.window.kind == "prompt":
            self._chunks_in_flight -= 1
        else:
            for group in self.groups:
                group.window = 0 if group.window == flight.window.id else group.window
        for run in flight.runs:
            if run is not None:
                run.in_flight -= 1


def _history(run: Run, limits: DraftLimits) -> tuple[Tokens, list[int]] | None:
    """Without copies: what has been generated grows only when the window that reads it has reported."""
    return (run.request.prompt, run.generated) if limits.lookup or run.request.sampling.has_penalties else None
