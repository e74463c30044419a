"""The slot machine: take an event, return commands. No I/O, no clock, no threads.

``receive`` is the whole story: the event changes the machine; whoever can be seated is seated; every window that can go is sent; if a
running answer lacks a page, somebody makes way. The same object runs in production (fed by ``manager.py``), in ``tools/simulate`` and
``tools/replay`` (fed from a virtual clock), and in the tests (fed random histories, checked after every event).
Rules: an event that cannot happen raises before anything has changed; every admitted request gets exactly one terminal event.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Any

from strata.errors import Draining, EngineDead, EngineError, QueueFull, StrataError
from strata.messages import Cancelled, CopyDone, EngineFacts, EngineFailed, Failed, Finished, FinishReason, Request, WindowDone
from strata.slots import events, states
from strata.slots.admission import check_request, make_run
from strata.slots.conversation import Conversation
from strata.slots.events import Command, Event
from strata.slots.memory import Memory
from strata.slots.picture import check_integrity, picture
from strata.slots.policy import SlotPolicy, choose_groups, retry_after
from strata.slots.results import Advance, advance
from strata.slots.seating import Seating, Verdict
from strata.slots.slot import Outcome, Run, Slot
from strata.slots.states import ConversationEvent, ConversationState, RequestEvent, RequestState, SlotEvent, SlotState
from strata.slots.view import Counters, MachineView
from strata.slots.window import Scheduler


class SlotMachine:
    """Slots, queue, and conversations of one engine. Not thread-safe: one owner feeds it."""

    def __init__(self, facts: EngineFacts, policy: SlotPolicy) -> None:
        self.facts = facts
        self.policy = policy
        self.num_groups = choose_groups(policy.slots, facts.num_stages, policy.groups)
        size = policy.slots // self.num_groups
        self.slots = [Slot(number, number // size) for number in range(policy.slots)]
        self.counters = Counters()
        self.out: list[Command] = []
        self.memory = Memory(facts, policy, self.slots, self.out, self.counters)
        self.seating = Seating(policy, self.num_groups, self.memory, self.slots)
        self.scheduler = Scheduler(policy, self.num_groups, self.memory, self.slots)
        self.runs: dict[str, Run] = {}
        self.queue: list[Run] = []
        self.draining = False
        self.dead = ""
        self.now = 0.0
        self._last_order = 0
        self._mean_seconds = 1.0
        self._may_seat = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            WindowDone: self._window_done, CopyDone: self._copy_done, EngineFailed: self._engine_failed,
            events.Arrive: self._arrive, events.Cancel: self._cancel, events.Stop: self._stop,
            events.Tick: self._tick, events.Drain: self._drain, events.Abort: self._abort,
        }

    # ---- the story

    def receive(self, event: Event, now: float) -> list[Command]:
        """Everything that follows from ``event`` at time ``now``, in the order in which it must be carried out.

        Raises (and changes nothing): for ``Arrive`` the refusals named there; ``IllegalEvent`` for what cannot happen.
        """
        self.now = now
        self._handlers[type(event)](event)
        while not self.dead:
            self._seat_waiting()
            starving = self.scheduler.schedule(now)
            if not starving or not self._relieve(starving):
                break
        commands = self.out[:]
        self.out.clear()
        return commands

    @property
    def is_idle(self) -> bool:
        """Nothing is admitted, and nothing is in flight."""
        return not (self.runs or self.scheduler.flights or self.memory.transfers)

    def wake_at(self) -> float | None:
        """When a ``Tick`` is due (the next deadline in the queue), if ever."""
        return min((run.deadline for run in self.queue if run.deadline), default=None)

    def view(self, now: float) -> MachineView:
        return picture(self, now)

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` where the books do not balance. Costs a walk over all page tables: run it when idle."""
        check_integrity(self)

    # ---- requests come and go

    def _arrive(self, event: events.Arrive) -> None:
        check_request(event.request, self.runs, self.policy, self.facts, self.memory.num_usable)
        self._check_open(event.request)
        self._last_order += 1
        run = make_run(event, self._last_order, self.policy, self.facts, self.now)
        self.runs[run.request.id] = run
        self.queue.append(run)
        self._may_seat = True

    def _check_open(self, request: Request) -> None:
        if self.dead:
            raise EngineDead(f"The engine has stopped ({self.dead}). The server must be restarted.")
        if self.draining:
            raise Draining("The server is shutting down. Please retry on another instance.")
        has_seat = any(slot.is_free for slot in self.slots)
        if len(self.queue) >= self.policy.queue_limit and (self.queue or not has_seat):
            raise self._queue_full(f"{len(self.queue)} requests are waiting already. Please retry later.")

    def _queue_full(self, message: str) -> QueueFull:
        error = QueueFull(message)
        error.retry_after = retry_after(len(self.queue), len(self.slots), self._mean_seconds)
        return error

    def _cancel(self, event: events.Cancel) -> None:
        run = self.runs.get(event.request_id)
        if run is not None:
            self.out.append(Cancelled(run.request.id, run.usage(self.now, False), _seat_of(run)))
            self._end(run, "cancelled", Outcome.HOLD)

    def _stop(self, event: events.Stop) -> None:
        run = self.runs.get(event.request_id)
        if run is not None:
            self._finish(run, "stop")

    def _finish(self, run: Run, reason: FinishReason) -> None:
        self.out.append(Finished(run.request.id, reason, run.usage(self.now, True), _seat_of(run)))
        self._end(run, reason, Outcome.HOLD)

    def _fail(self, run: Run, error: StrataError, outcome: Outcome = Outcome.DROP) -> None:
        self.out.append(Failed(run.request.id, error, run.usage(self.now, False)))
        self._end(run, "failed", outcome)

    def _tick(self, event: events.Tick) -> None:
        self.memory.host.free = event.host_free if event.host_free is not None else self.memory.host.free
        for run in [run for run in self.queue if run.deadline and run.deadline <= self.now]:
            waited = f"The request waited {self.now - run.arrived_at:.0f} s in the queue without getting a slot. Please retry later."
            self._fail(run, self._queue_full(waited))

    def _drain(self, event: events.Drain) -> None:
        self.draining = True

    def _abort(self, event: events.Abort) -> None:
        self.draining = True
        for run in list(self.runs.values()):
            self._fail(run, Draining(event.message), Outcome.HOLD)

    # ---- the engine reports

    def _window_done(self, event: WindowDone) -> None:
        if self.dead:
            return
        flight = self.scheduler.land(event)
        for run, segment, result in zip(flight.runs, flight.window.segments, event.results):
            if run is None:
                continue
            step = advance(run, segment, result, self)
            if step is Advance.FAILED:
                self._row_failed(run, result.error)
            elif step is Advance.OVER:
                self._settle(run.slot)
            elif step is not Advance.GOES_ON:
                self._finish(run, "stop" if step is Advance.STOP else "length")

    def _row_failed(self, run: Run, message: str) -> None:
        if run.state is RequestState.SEATED:
            self._fail(run, EngineError(message))
        elif run.slot is not None:
            self._spoil(run)

    def _spoil(self, run: Run) -> None:
        """A window of a run that had ended (or was being preempted) was lost: its history cannot be kept."""
        if run.slot is not None:
            run.slot.outcome = Outcome.DROP
            self._settle(run.slot)

    def _copy_done(self, event: CopyDone) -> None:
        if self.dead:
            return
        conversation = self.memory.copy_done(event)
        self._may_seat = True
        if conversation.state is ConversationState.GONE:
            for run in self.queue:
                if run.conversation is conversation:
                    run.conversation = None
        elif conversation.state is ConversationState.BUSY:
            self._restored(self.slots[conversation.slot or 0], conversation)

    def _restored(self, slot: Slot, conversation: Conversation) -> None:
        run = slot.run
        if run is None or slot.state is SlotState.LEAVING:
            self._settle(slot)
            return
        run.submitted = len(conversation.tokens)
        if run.submitted < run.cached:
            self.counters.cached_tokens -= run.cached - run.submitted
            run.cached = run.submitted
        was_decoding = bool(run.generated) and run.submitted == run.total - 1
        slot.step(SlotEvent.RESUMED if was_decoding else SlotEvent.RESTORED)

    def _engine_failed(self, event: EngineFailed) -> None:
        if self.dead:
            return
        if event.window_ids:
            for run in self.scheduler.lose(event.window_ids):
                if run.state is RequestState.SEATED:
                    self._fail(run, EngineError(event.message))
                else:
                    self._spoil(run)
            return
        self.dead = event.message
        self.scheduler.lose(tuple(self.scheduler.flights))
        for run in list(self.runs.values()):
            self._fail(run, EngineDead(f"The engine has stopped ({event.message}). The server must be restarted."))
        for copy_id in list(self.memory.transfers):
            self._settle_copy(copy_id)
        for slot in self.slots:
            if slot.state is SlotState.LEAVING:
                self._settle(slot)

    def _settle_copy(self, copy_id: int) -> None:
        conversation = self.memory.copy_done(CopyDone(copy_id, "the engine has stopped"))
        if conversation.state is ConversationState.BUSY:
            self._settle(self.slots[conversation.slot or 0])

    # ---- seats change hands

    def _seat_waiting(self) -> None:
        """Seat whoever can be seated, in order of arrival; a request that must wait for something of its own lets others pass."""
        if not self._may_seat:
            return
        self._may_seat = False
        for run in list(self.queue):
            if run.is_waiting_for_prefix():
                continue
            if run.state is RequestState.PREEMPTED and run.total + 1 > self.memory.num_usable * self.facts.page_tokens:
                self._finish(run, "length")
                continue
            running = sum(slot.run is not None for slot in self.slots)
            verdict = self.seating.try_seat(run, self.now, running if run.state is RequestState.PREEMPTED else 0)
            if verdict is Verdict.SEATED:
                self.queue.remove(run)
            elif verdict is Verdict.BLOCKED:
                break

    def _end(self, run: Run, kind: str, outcome: Outcome) -> None:
        """After the terminal event: leave queue and books; the seat is free when the last window in flight has reported."""
        is_seated = run.state is RequestState.SEATED
        run.state = states.step(states.REQUEST, run.state, RequestEvent.END)
        del self.runs[run.request.id]
        self.counters.ended[kind] += 1
        self._may_seat = True
        if not is_seated:
            self.queue.remove(run)
        slot, conversation = run.slot, run.conversation
        if slot is not None:
            if is_seated:
                slot.step(SlotEvent.END)
                self._mean_seconds += 0.1 * (self.now - (run.seated_at or 0.0) - self._mean_seconds)
            slot.outcome = outcome
            self._settle(slot)
        elif conversation is not None:
            conversation.claimed = False
            self.memory.trim_host()

    def _settle(self, slot: Slot | None) -> None:
        """Free a LEAVING slot once nothing in flight names its pages."""
        if slot is None or slot.run is None or slot.conversation is None:
            return
        run, conversation = slot.run, slot.conversation
        if run.in_flight or conversation.state is ConversationState.RESTORING:
            return
        slot.run = run.slot = None
        slot.used = conversation.used = self.now
        self._may_seat = True
        conversation.claimed = run.state is RequestState.PREEMPTED
        self.memory.release_spare(conversation)
        is_empty = not conversation.tokens or slot.outcome is Outcome.DROP
        if not is_empty and slot.outcome is Outcome.HOLD and not run.one_shot:
            conversation.step(ConversationEvent.HOLD)
            self.memory.index.put(conversation.id, conversation.tokens.tobytes())
            slot.step(SlotEvent.HOLD)
            return
        slot.step(SlotEvent.CLEAR)
        slot.conversation = conversation.slot = None
        if is_empty or slot.outcome is Outcome.HOLD:
            self.memory.drop(conversation, "error" if slot.outcome is Outcome.DROP else "")
            run.conversation = None
        else:
            self.memory.park(conversation)

    def _relieve(self, starving: list[Run]) -> bool:
        """Decoding runs lack a page and nothing idle is left: the youngest request makes way. True: something changed at once.

        False also where pages are on their way: a copy out or a leaving slot will report. A request that is alone and has the
        whole pool ends with ``length``.
        """
        if self.memory.is_copying_out or any(slot.state is SlotState.LEAVING for slot in self.slots):
            return False
        seated = [slot.run for slot in self.slots if slot.run is not None]
        if len(seated) == 1:
            self._finish(starving[0], "length")
            return True
        youngest = max(seated, key=lambda run: run.order)
        youngest.state = states.step(states.REQUEST, youngest.state, RequestEvent.PREEMPT)
        youngest.preemptions += 1
        self.counters.preemptions += 1
        insort(self.queue, youngest, key=lambda run: run.order)
        slot = youngest.slot
        assert slot is not None
        slot.step(SlotEvent.END)
        slot.outcome = Outcome.PARK
        self._settle(slot)
        return True


def _seat_of(run: Run) -> int:
    return run.slot.id if run.slot is not None else -1
