"""The three life cycles: tables that are closed and reachable, and a step that refuses without changing anything."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from strata.slots import states
from strata.slots.conversation import Conversation
from strata.slots.slot import Slot
from strata.slots.states import ConversationEvent, ConversationState, IllegalTransition, RequestState, SlotEvent, SlotState

TABLES = [
    (states.SLOT, SlotState.EMPTY, SlotState, SlotEvent),
    (states.REQUEST, RequestState.WAITING, RequestState, states.RequestEvent),
    (states.CONVERSATION, ConversationState.BUSY, ConversationState, ConversationEvent),
]


@pytest.mark.parametrize(("table", "start", "all_states", "all_events"), TABLES)
def test_every_state_has_a_row_and_can_be_reached_and_every_event_is_used(
    table: Mapping[Any, Mapping[Any, Any]], start: Enum, all_states: type[Enum], all_events: type[Enum],
) -> None:
    assert set(table) == set(all_states)
    reached, new = {start}, {start}
    while new:
        new = {after for state in new for after in table[state].values()} - reached
        reached |= new
    assert reached == set(all_states)
    assert {event for row in table.values() for event in row} == set(all_events)


@pytest.mark.parametrize(("table", "start", "all_states", "all_events"), TABLES)
def test_an_event_that_is_not_listed_raises(
    table: Mapping[Any, Mapping[Any, Any]], start: Enum, all_states: type[Enum], all_events: type[Enum],
) -> None:
    for state in all_states:
        for event in all_events:
            if event in table[state]:
                assert states.step(table, state, event) is table[state][event]
            else:
                with pytest.raises(IllegalTransition, match=str(event.value)):
                    states.step(table, state, event)


def test_an_illegal_event_leaves_the_state_as_it_was() -> None:
    slot, conversation = Slot(0, 0), Conversation(1, "", "")
    with pytest.raises(IllegalTransition):
        slot.step(SlotEvent.PROMPT_READ)
    with pytest.raises(IllegalTransition):
        conversation.step(ConversationEvent.PARKED)
    assert slot.state is SlotState.EMPTY and conversation.state is ConversationState.BUSY


def test_a_busy_seat_becomes_free_only_through_leaving() -> None:
    busy = {SlotState.RESTORING, SlotState.READING, SlotState.DECODING}
    free = {SlotState.EMPTY, SlotState.HELD}
    for state in busy:
        assert set(states.SLOT[state].values()) <= busy | {SlotState.LEAVING}
    assert set(states.SLOT[SlotState.LEAVING].values()) == free
