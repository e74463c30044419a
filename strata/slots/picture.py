"""Looks at a machine without touching it: the frozen picture for /slots and /metrics, and the check that its books balance."""

from __future__ import annotations

from typing import Protocol

from strata.messages import EngineFacts
from strata.slots.desk import Desk
from strata.slots.memory import Memory
from strata.slots.slot import Slot
from strata.slots.states import ConversationState, RequestState, SlotState
from strata.slots.view import Counters, MachineView, SlotView
from strata.slots.window import Scheduler


class Machine(Protocol):
    """What is looked at: machine.py's SlotMachine."""

    facts: EngineFacts
    memory: Memory
    slots: list[Slot]
    desk: Desk
    scheduler: Scheduler
    counters: Counters
    draining: bool
    dead: str


def picture(machine: Machine, now: float) -> MachineView:
    """A frozen copy of what can be told about the machine at ``now``."""
    memory = machine.memory
    free, busy, held, shelved = memory.page_counts()
    states = [one.state for one in memory.conversations.values()]
    return MachineView(
        slots=tuple(_slot(slot, machine.facts.context, now) for slot in machine.slots),
        running=sum(run.state is RequestState.SEATED for run in machine.desk.runs.values()),
        waiting=sum(run.state is RequestState.WAITING for run in machine.desk.queue),
        preempted=sum(run.state is RequestState.PREEMPTED for run in machine.desk.queue),
        windows_in_flight=len(machine.scheduler.flights),
        pages_total=memory.pages.num_pages, pages_free=free, pages_busy=busy, pages_held=held, pages_shelved=shelved,
        page_tokens=machine.facts.page_tokens,
        tokens_held=sum(len(one.tokens) for one in memory.conversations.values() if one.pages),
        shelved=states.count(ConversationState.SHELVED),
        parked=states.count(ConversationState.PARKED),
        parked_bytes=memory.host.used, parked_limit=memory.host.limit,
        draining=machine.draining, dead=machine.dead, counters=machine.counters.copy(), groups=machine.scheduler.num_windows,
    )


def _slot(slot: Slot, context: int, now: float) -> SlotView:
    run = slot.run
    tokens = len(slot.conversation.tokens) if slot.conversation is not None else 0
    if run is None:
        return SlotView(slot.id, slot.group, slot.state.value, tokens, context, idle_s=now - slot.used if slot.used else 0.0)
    prompt = len(run.request.prompt)
    wanted = run.drafts.wanted if run.drafts is not None else None
    return SlotView(
        slot.id, slot.group, slot.state.value, tokens, context, run.request.id, prompt, run.cached, min(tokens, prompt),
        len(run.generated), run.drafted, run.accepted, run.drafts.windows if run.drafts is not None else 0,
        (wanted.mtp, wanted.lookup) if wanted is not None else (0, 0),
    )


def check_integrity(machine: Machine) -> None:
    """Raises ``AssertionError`` with the first thing that does not fit."""
    memory = machine.memory
    tables = [one.pages for one in memory.conversations.values()]
    memory.pages.check_integrity(tables + ([[memory.pad_page]] if memory.pad_page >= 0 else []))
    assert sum(memory.page_counts()) == memory.pages.num_pages, f"page kinds do not add up: {memory.page_counts()}"
    _check_conversations(machine)
    _check_slots(machine)
    queued = [run.request.id for run in machine.desk.queue]
    seated = [slot.run.request.id for slot in machine.slots if slot.run is not None and slot.run.state is RequestState.SEATED]
    assert len(set(queued)) == len(queued) and not set(queued) & set(seated), "a request is in two places"
    assert sorted(queued + seated) == sorted(machine.desk.runs), "a request is nowhere, or has ended and is still there"


def _check_conversations(machine: Machine) -> None:
    memory, size = machine.memory, machine.facts.page_tokens
    freeing = sum(transfer.freeing for transfer in memory.transfers.values())
    assert memory.freeing == freeing, f"{memory.freeing} pages counted as on their way, {freeing} are"
    for one in memory.conversations.values():
        is_seated = one.state in (ConversationState.BUSY, ConversationState.HELD, ConversationState.RESTORING)
        assert is_seated == (one.slot is not None), f"conversation {one.id} is {one.state.value} and has seat {one.slot}"
        assert one.id in memory.index, f"conversation {one.id} cannot be found"
        if one.slot is not None:
            assert machine.slots[one.slot].conversation is one, f"slot {one.slot} does not know conversation {one.id}"
        if one.state is ConversationState.PARKED:
            assert not one.pages and one.host, f"parked conversation {one.id} has pages or no image"
        elif one.state is not ConversationState.PARKING:
            assert len(one.pages) * size >= len(one.tokens), f"conversation {one.id} has more tokens than pages"
        if one.state in (ConversationState.HELD, ConversationState.SHELVED):
            assert not one.claimed and not one.host and len(one.pages) == memory.pages_for(len(one.tokens))
        # A partly filled page is written to, so it must be private; so must every page beyond it.
        if one.state is not ConversationState.PARKED:
            rest = one.pages[len(one.tokens) // size:]
            assert all(memory.pages.refs[page] == 1 for page in rest), f"conversation {one.id} would write a shared page"


def _check_slots(machine: Machine) -> None:
    for slot in machine.slots:
        is_busy = not slot.is_free
        assert is_busy == (slot.run is not None), f"slot {slot.id} is {slot.state.value} and its run is {slot.run}"
        assert (slot.state is SlotState.EMPTY) == (slot.conversation is None), f"slot {slot.id}: conversation and state disagree"
        if slot.run is not None:
            assert slot.run.slot is slot and slot.run.conversation is slot.conversation
        if slot.state is SlotState.LEAVING and slot.run is not None:
            waits = slot.run.in_flight or (slot.conversation and slot.conversation.state is ConversationState.RESTORING)
            assert waits, f"slot {slot.id} leaves and nothing holds it"
