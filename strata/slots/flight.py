"""Windows in flight: whose rows they hold, which groups wait for them, and what a report must be like to be believed."""

from __future__ import annotations

from dataclasses import dataclass, field

from strata.messages import Segment, SegmentResult, Window
from strata.slots.conversation import Conversation
from strata.slots.events import IllegalEvent
from strata.slots.slot import Outcome, Run, Slot
from strata.slots.speculation import Schedule
from strata.slots.states import SlotState


@dataclass(slots=True)
class Group:
    """Contiguous slots that decode together. ``window``: its decode window in flight, 0 for none. ``turn``: who is first next time.

    ``drafting``: when its drafts are chosen again.
    """

    id: int
    slots: list[Slot]
    window: int = 0
    turn: int = 0
    drafting: Schedule = field(default_factory=Schedule)


@dataclass(slots=True)
class Flight:
    """A window in flight and whose rows it holds (None: a pad row). ``sent``: when, if nothing else was in flight (else None)."""

    window: Window
    runs: list[Run | None]
    sent: float | None


def check_report(run: Run, segment: Segment, result: SegmentResult) -> None:
    """Raises ``IllegalEvent`` where a result is not its segment's, or came before that of an earlier window of the run."""
    slot = slot_of(run)
    if slot.state is SlotState.LEAVING and slot.outcome is Outcome.DROP:
        return  # an earlier window was lost, and with it the order
    if segment.start != len(conversation_of(run).tokens):
        raise IllegalEvent(f"windows of {segment.request_id} must report in the order in which they were sent")
    if len(result.picks) != (0 if segment.sampling is None else result.accepted + 1) or result.accepted > segment.num_drafts:
        raise IllegalEvent(f"{len(result.picks)} picks and {result.accepted} accepted drafts do not fit a window of {segment.request_id}")


def conversation_of(run: Run) -> Conversation:
    assert run.conversation is not None
    return run.conversation


def slot_of(run: Run) -> Slot:
    assert run.slot is not None
    return run.slot
