"""The slot machine: take an event, return commands. No I/O, no clock, no threads.

``receive`` is the whole story: the event changes the machine; whoever can be seated is seated; every window that can go is sent; if a
running answer lacks a page, somebody makes way. The same object runs in production (fed by ``manager.py``), in ``tools/simulate`` and
``tools/replay`` (fed from a virtual clock), and in the tests (fed random histories, checked after every event).
Rules: an event that cannot happen raises before anything has changed; every admitted request gets exactly one terminal event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strata.errors import Draining, EngineDead, EngineError, NotFinite
from strata.messages import CopyDone, EngineFacts, EngineFailed, WindowDone
from strata.slots import events
from strata.slots.admission import check_request, make_run
from strata.slots.conversation import Conversation
from strata.slots.desk import Desk
from strata.slots.events import Command, Event
from strata.slots.memory import Memory
from strata.slots.picture import check_integrity, picture
from strata.slots.policy import SlotPolicy, choose_groups
from strata.slots.results import Advance, advance
from strata.slots.seating import Seating, Verdict
from strata.slots.slot import Outcome, Run, Slot
from strata.slots.states import ConversationState, RequestState, SlotEvent, SlotState
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
        self.desk = Desk(self.memory, self.slots)
        self.seating = Seating(policy, self.num_groups, self.memory, self.slots)
        self.scheduler = Scheduler(policy, self.num_groups, self.memory, self.slots)
        self.draining = False
        self.dead = ""
        self._last_order = 0
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
        self.desk.now = now
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
        return not (self.desk.runs or self.scheduler.flights or self.memory.transfers)

    def wake_at(self) -> float | None:
        """When a ``Tick`` is due (the next deadline in the queue), if ever."""
        return self.desk.next_deadline or None

    def view(self, now: float) -> MachineView:
        """A frozen picture for /slots and /metrics."""
        return picture(self, now)

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` where the books do not balance. Costs a walk over all page tables: run it when idle."""
        check_integrity(self)

    # ---- requests come and go

    def _arrive(self, event: events.Arrive) -> None:
        check_request(event.request, self.desk.runs, self.policy, self.facts, self.memory.num_usable)
        self._check_open()
        self._last_order += 1
        self.desk.admit(make_run(event, self._last_order, self.policy, self.facts, self.desk.now))

    def _check_open(self) -> None:
        if self.dead:
            raise EngineDead(f"The engine has stopped ({self.dead}). The server must be restarted.")
        if self.draining:
            raise Draining("The server is shutting down. Please retry on another instance.")
        waiting = len(self.desk.queue)
        if waiting >= self.policy.queue_limit and (waiting or not any(slot.is_free for slot in self.slots)):
            raise self.desk.queue_full(f"{waiting} requests are waiting already. Please retry later.")

    def _cancel(self, event: events.Cancel) -> None:
        run = self.desk.runs.get(event.request_id)
        if run is not None:
            self.desk.cancel(run)

    def _stop(self, event: events.Stop) -> None:
        run = self.desk.runs.get(event.request_id)
        if run is not None:
            self.desk.finish(run, "stop")

    def _tick(self, event: events.Tick) -> None:
        now = self.desk.now
        if event.host_free is not None:
            self.memory.host.free = event.host_free
        for run in [run for run in self.desk.queue if run.deadline and run.deadline <= now]:
            waited = f"{now - run.arrived_at:.1f}".removesuffix(".0")
            message = f"The request waited {waited} s in the queue without getting a slot. Please retry later."
            self.desk.fail(run, self.desk.queue_full(message), Outcome.HOLD)

    def _drain(self, event: events.Drain) -> None:
        self.draining = True

    def _abort(self, event: events.Abort) -> None:
        self.draining = True
        for run in list(self.desk.runs.values()):
            self.desk.fail(run, Draining(event.message), Outcome.HOLD)

    # ---- the engine reports; a dead engine's late reports are ignored

    def _window_done(self, event: WindowDone) -> None:
        if self.dead:
            return
        flight = self.scheduler.land(event, self.desk.now)
        for run, segment, result in zip(flight.runs, flight.window.segments, event.results):
            if run is None:
                continue
            step = advance(run, flight.window.kind == "decode", segment, result, self.desk)
            self.desk.may_seat |= any(other.waits_for is run for other in self.desk.queue)
            if step is Advance.FAILED:
                self._lose(run, NotFinite(result.error))
            elif step is Advance.STOP:
                self.desk.finish(run, "stop")
            elif step is Advance.LENGTH:
                self.desk.finish(run, "length")
            elif run.state is not RequestState.SEATED and run.slot is not None:
                self.desk.settle(run.slot)

    def _lose(self, run: Run, error: EngineError) -> None:
        if run.state is RequestState.ENDED:
            self.desk.spoil(run)
        else:
            self.desk.fail(run, error, Outcome.DROP)

    def _copy_done(self, event: CopyDone) -> None:
        if self.dead:
            return
        conversation = self.memory.copy_done(event)
        self.desk.may_seat = True
        if conversation.state is ConversationState.GONE:
            for run in self.desk.queue:
                if run.conversation is conversation:
                    run.conversation = None
        elif conversation.state is ConversationState.BUSY and conversation.slot is not None:
            self._restored(self.slots[conversation.slot], conversation)

    def _restored(self, slot: Slot, conversation: Conversation) -> None:
        run = slot.run
        if run is None or slot.state is SlotState.LEAVING:
            self.desk.settle(slot)
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
                self._lose(run, EngineError(event.message))
        else:
            self._die(event.message)

    def _die(self, message: str) -> None:
        """The engine is gone for good: nothing in flight will report, nobody will be seated again."""
        self.dead = message or "no reason given"
        self.scheduler.lose(tuple(self.scheduler.flights))
        for run in list(self.desk.runs.values()):
            self.desk.fail(run, EngineDead(f"The engine has stopped ({self.dead}). The server must be restarted."), Outcome.DROP)
        for copy_id in list(self.memory.transfers):
            self.memory.copy_done(CopyDone(copy_id, self.dead))
        for slot in self.slots:
            if slot.state is SlotState.LEAVING:
                self.desk.settle(slot)

    # ---- seats

    def _seat_waiting(self) -> None:
        """Seat whoever can be seated, in order of arrival; a request that must wait for something of its own lets others pass.

        A preempted one always fits the pool again: it made way for a request that had a page of its own, which is room for its next token.
        """
        desk = self.desk
        if not desk.may_seat or not desk.queue:
            return
        desk.may_seat = False
        if not any(slot.is_free for slot in self.slots):
            return
        for run in list(desk.queue):
            if run.is_waiting_for_prefix():
                continue
            preempted = run.state is RequestState.PREEMPTED
            # One page for every running request stays free, or the one that comes back would soon be preempted again.
            headroom = sum(slot.run is not None for slot in self.slots) if preempted else 0
            verdict = self.seating.try_seat(run, desk.now, headroom)
            if verdict is Verdict.SEATED:
                desk.dequeue(run)
                run.deadline = 0.0  # it was for the first wait; a preempted request may come back whenever it can
            elif verdict is Verdict.BLOCKED:
                break

    def _relieve(self, starving: list[Run]) -> bool:
        """Decoding runs lack a page and nothing idle is left: the youngest request makes way. True: something changed at once.

        False also where pages are on their way: a copy out or a leaving slot will report. A request that is alone and has the
        whole pool ends with ``length``.
        """
        if self.memory.is_copying_out or any(slot.state is SlotState.LEAVING for slot in self.slots):
            return False
        seated = [slot.run for slot in self.slots if slot.run is not None]
        if len(seated) == 1:
            self.desk.finish(starving[0], "length")
        else:
            self.desk.preempt(max(seated, key=lambda run: run.order))
        return True
