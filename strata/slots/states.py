"""The lives of a slot, a request and a conversation, each as a literal table: state x event -> state.

Two rules. Everything that may happen to a state is in these tables; an event that a state does not list raises
``IllegalTransition`` and changes nothing. ``tools/draw_states.py`` draws docs/states.svg from them, so the picture cannot rot.

A *slot* is a seat. Its LEAVING state exists because a window in flight still names the slot's pages: the request is over
(or preempted), the seat is not free before the last of those windows has reported.
A *conversation* is tokens and pages; it outlives its seat (SHELVED) and even its pages on the device (PARKED in host memory).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar


class SlotState(str, Enum):
    EMPTY = "empty"
    HELD = "held"
    RESTORING = "restoring"
    READING = "reading"
    DECODING = "decoding"
    LEAVING = "leaving"


class SlotEvent(str, Enum):
    SEAT = "seat"
    SEAT_AND_RESTORE = "seat and restore"
    RESTORED = "restored"
    RESUMED = "resumed"
    PROMPT_READ = "prompt read"
    END = "end"
    HOLD = "hold"
    CLEAR = "clear"
    VACATE = "vacate"


class RequestState(str, Enum):
    WAITING = "waiting"
    SEATED = "seated"
    PREEMPTED = "preempted"
    ENDED = "ended"


class RequestEvent(str, Enum):
    SEAT = "seat"
    PREEMPT = "preempt"
    END = "end"


class ConversationState(str, Enum):
    BUSY = "busy"
    HELD = "held"
    SHELVED = "shelved"
    PARKING = "parking"
    PARKED = "parked"
    RESTORING = "restoring"
    GONE = "gone"


class ConversationEvent(str, Enum):
    SEAT = "seat"
    HOLD = "hold"
    UNSEAT = "unseat"
    PARK = "park"
    PARKED = "parked"
    RESTORE = "restore"
    RESTORED = "restored"
    DROP = "drop"


SLOT: Mapping[SlotState, Mapping[SlotEvent, SlotState]] = {
    SlotState.EMPTY: {
        SlotEvent.SEAT: SlotState.READING,
        SlotEvent.SEAT_AND_RESTORE: SlotState.RESTORING,
    },
    SlotState.HELD: {
        SlotEvent.SEAT: SlotState.READING,
        SlotEvent.VACATE: SlotState.EMPTY,
    },
    SlotState.RESTORING: {
        SlotEvent.RESTORED: SlotState.READING,
        SlotEvent.RESUMED: SlotState.DECODING,
        SlotEvent.END: SlotState.LEAVING,
    },
    SlotState.READING: {
        SlotEvent.PROMPT_READ: SlotState.DECODING,
        SlotEvent.END: SlotState.LEAVING,
    },
    SlotState.DECODING: {
        SlotEvent.END: SlotState.LEAVING,
    },
    SlotState.LEAVING: {
        SlotEvent.HOLD: SlotState.HELD,
        SlotEvent.CLEAR: SlotState.EMPTY,
    },
}

REQUEST: Mapping[RequestState, Mapping[RequestEvent, RequestState]] = {
    RequestState.WAITING: {
        RequestEvent.SEAT: RequestState.SEATED,
        RequestEvent.END: RequestState.ENDED,
    },
    RequestState.SEATED: {
        RequestEvent.PREEMPT: RequestState.PREEMPTED,
        RequestEvent.END: RequestState.ENDED,
    },
    RequestState.PREEMPTED: {
        RequestEvent.SEAT: RequestState.SEATED,
        RequestEvent.END: RequestState.ENDED,
    },
    RequestState.ENDED: {},
}

CONVERSATION: Mapping[ConversationState, Mapping[ConversationEvent, ConversationState]] = {
    ConversationState.BUSY: {
        ConversationEvent.HOLD: ConversationState.HELD,
        ConversationEvent.PARK: ConversationState.PARKING,
        ConversationEvent.RESTORE: ConversationState.RESTORING,
        ConversationEvent.DROP: ConversationState.GONE,
    },
    ConversationState.HELD: {
        ConversationEvent.SEAT: ConversationState.BUSY,
        ConversationEvent.UNSEAT: ConversationState.SHELVED,
        ConversationEvent.DROP: ConversationState.GONE,
    },
    ConversationState.SHELVED: {
        ConversationEvent.SEAT: ConversationState.BUSY,
        ConversationEvent.PARK: ConversationState.PARKING,
        ConversationEvent.DROP: ConversationState.GONE,
    },
    ConversationState.PARKING: {
        ConversationEvent.PARKED: ConversationState.PARKED,
        ConversationEvent.DROP: ConversationState.GONE,
    },
    ConversationState.PARKED: {
        ConversationEvent.RESTORE: ConversationState.RESTORING,
        ConversationEvent.DROP: ConversationState.GONE,
    },
    ConversationState.RESTORING: {
        ConversationEvent.RESTORED: ConversationState.BUSY,
        ConversationEvent.DROP: ConversationState.GONE,
    },
    ConversationState.GONE: {},
}


class IllegalTransition(Exception):
    """A state was sent an event that its table does not list. Always a bug in this package, never a client's fault."""


S = TypeVar("S", SlotState, RequestState, ConversationState)
E = TypeVar("E", SlotEvent, RequestEvent, ConversationEvent)


def step(table: Mapping[S, Mapping[E, S]], state: S, event: E) -> S:
    """The state after ``event``; raises ``IllegalTransition`` where the table has none."""
    try:
        return table[state][event]
    except KeyError:
        raise IllegalTransition(f"{type(state).__name__} {state.value!r} cannot take {event.value!r}") from None
