"""The book of admitted requests: who waits, who is seated, how each one ends, and how its seat becomes free.

A request leaves in two steps. Its terminal event goes out at once; its seat is LEAVING until nothing in flight names its pages, and only
then is the history held, dropped or parked. A preempted request takes the same way out of its seat, and goes back to the queue.
"""

from __future__ import annotations

from bisect import insort

from strata.errors import QueueFull, StrataError
from strata.messages import Cancelled, Failed, Finished, FinishReason
from strata.slots import states
from strata.slots.events import Trace
from strata.slots.memory import Memory
from strata.slots.policy import retry_after
from strata.slots.slot import Outcome, Run, Slot
from strata.slots.states import ConversationEvent, ConversationState, RequestEvent, RequestState, SlotEvent


class Desk:
    """Owner of runs and queue. ``may_seat``: something has changed since the queue was last looked through. ``now``: of the event.

    ``next_deadline``: the first in the queue, 0 for none.
    """

    def __init__(self, memory: Memory, slots: list[Slot]) -> None:
        self.memory = memory
        self.slots = slots
        self.out = memory.out
        self.counters = memory.counters
        self.runs: dict[str, Run] = {}
        self.queue: list[Run] = []
        self.now = 0.0
        self.next_deadline = 0.0
        self.may_seat = False
        self._mean_seconds = 1.0

    def admit(self, run: Run) -> None:
        self.runs[run.request.id] = run
        self._enqueue(run)

    def _enqueue(self, run: Run) -> None:
        """In order of arrival, so a preempted request stands before those that came later."""
        insort(self.queue, run, key=lambda one: one.order)
        self.may_seat = True
        if run.deadline:
            self.next_deadline = min(run.deadline, self.next_deadline or run.deadline)

    def dequeue(self, run: Run) -> None:
        self.queue.remove(run)
        if run.deadline and run.deadline == self.next_deadline:
            self.next_deadline = min((one.deadline for one in self.queue if one.deadline), default=0.0)

    def queue_full(self, message: str) -> QueueFull:
        """The refusal, with an estimate of when to come back."""
        error = QueueFull(message)
        error.retry_after = retry_after(len(self.queue), len(self.slots), self._mean_seconds)
        return error

    # ---- three ways to end, each with its one terminal event

    def finish(self, run: Run, reason: FinishReason) -> None:
        self.out.append(Finished(run.request.id, reason, run.usage(self.now, True), _seat_of(run)))
        self._end(run, reason, Outcome.HOLD)

    def fail(self, run: Run, error: StrataError, outcome: Outcome) -> None:
        self.out.append(Failed(run.request.id, error, run.usage(self.now, False)))
        self._end(run, "failed", outcome)

    def cancel(self, run: Run) -> None:
        self.out.append(Cancelled(run.request.id, run.usage(self.now, False), _seat_of(run)))
        self._end(run, "cancelled", Outcome.HOLD)

    def _end(self, run: Run, kind: str, outcome: Outcome) -> None:
        is_seated = run.state is RequestState.SEATED
        run.state = states.step(states.REQUEST, run.state, RequestEvent.END)
        del self.runs[run.request.id]
        self.counters.ended[kind] += 1
        self._trace(run)
        self.may_seat = True
        if not is_seated:
            self.dequeue(run)
        slot, conversation = run.slot, run.conversation
        if slot is not None:
            if is_seated:
                slot.step(SlotEvent.END)
                self._mean_seconds += 0.1 * (self.now - (run.seated_at or 0.0) - self._mean_seconds)
            slot.outcome = outcome
            self.settle(slot)
        elif conversation is not None:
            # A preempted request's image becomes an ordinary one.
            conversation.claimed = False
            self.memory.trim_host()

    def _trace(self, run: Run) -> None:
        if run.origin[0]:
            request = run.request
            prompt, generated = len(request.prompt), len(run.generated)
            self.out.append(Trace(request.id, run.arrived_at, *run.origin, prompt, run.cached, generated, _seat_of(run)))

    # ---- leaving

    def preempt(self, run: Run) -> None:
        """Back to the queue, in its old place; the history is parked and comes back with it."""
        slot = run.slot
        assert slot is not None
        run.state = states.step(states.REQUEST, run.state, RequestEvent.PREEMPT)
        run.preemptions += 1
        if run.drafts is not None:
            run.drafts.drop()
        self.counters.preemptions += 1
        self._enqueue(run)
        slot.step(SlotEvent.END)
        slot.outcome = Outcome.PARK
        self.settle(slot)

    def spoil(self, run: Run) -> None:
        """A window of a run that has ended was lost: its history cannot be kept."""
        if run.slot is not None:
            run.slot.outcome = Outcome.DROP
            self.settle(run.slot)

    def settle(self, slot: Slot) -> None:
        """Free a LEAVING slot once nothing in flight names its pages."""
        run, conversation = slot.run, slot.conversation
        assert run is not None and conversation is not None
        if run.in_flight or conversation.state is ConversationState.RESTORING:
            return
        slot.run = run.slot = None
        slot.used = conversation.used = self.now
        self.may_seat = True
        conversation.claimed = run.state is RequestState.PREEMPTED
        if slot.outcome is Outcome.PARK:
            self.memory.cut_to_resume_point(conversation)
        self.memory.release_spare(conversation)
        is_lost = slot.outcome is Outcome.DROP
        if conversation.tokens and slot.outcome is Outcome.HOLD and not run.one_shot:
            conversation.step(ConversationEvent.HOLD)
            self.memory.index_tokens(conversation)
            slot.step(SlotEvent.HOLD)
            return
        slot.step(SlotEvent.CLEAR)
        slot.conversation = conversation.slot = None
        if conversation.tokens and slot.outcome is Outcome.PARK:
            self.memory.park(conversation)
        else:
            self.memory.drop(conversation, "error" if is_lost and conversation.tokens else "")
            run.conversation = None


def _seat_of(run: Run) -> int:
    return run.slot.id if run.slot is not None else -1
