"""A slot, and the run of the request that sits in it.

A ``Run`` is one admitted request: its text is the prompt and what has been generated, and it advances by feeding the text's next
tokens to windows. Reading a prompt, decoding, and reading a lost history again are the same thing: feed what has not been fed;
when the last token of the text was fed, a new one is picked.
"""

from __future__ import annotations

from enum import Enum

from strata.messages import Tokens, Usage
from strata.request import Request
from strata.slots import states
from strata.slots.conversation import Conversation
from strata.slots.drafts import Drafts
from strata.slots.match import WIDTH, pack
from strata.slots.states import RequestState, SlotEvent, SlotState


class Outcome(Enum):
    """What becomes of a conversation when the slot's last window has reported."""

    HOLD = "hold"
    DROP = "drop"
    PARK = "park"


class Run:
    """One admitted request. ``limit``: tokens it may generate. ``submitted``: the position that the next window starts at.

    ``origin``: the ids of its conversation and of the one it shares ``origin[2]`` tokens with.
    """

    __slots__ = (
        "request", "packed_prompt", "order", "limit", "state", "conversation", "slot", "generated", "submitted", "in_flight",
        "overtaken", "cached", "logprobs_read", "waits_for", "waits_until", "drafted", "accepted", "preemptions",
        "arrived_at", "deadline", "seated_at", "first_at", "last_at", "origin", "drafts",
    )

    def __init__(self, request: Request, packed: bytes, order: int, limit: int, now: float) -> None:
        self.request = request
        self.packed_prompt = packed or pack(request.prompt)
        self.order = order
        self.limit = limit
        self.state = RequestState.WAITING
        self.conversation: Conversation | None = None
        self.slot: Slot | None = None
        self.generated: list[int] = []
        self.submitted = self.in_flight = self.overtaken = 0
        self.cached = self.logprobs_read = self.drafted = self.accepted = self.preemptions = 0
        self.drafts: Drafts | None = None
        self.waits_for: Run | None = None
        self.waits_until = 0
        self.origin = 0, 0, 0
        self.arrived_at = now
        self.deadline = 0.0
        self.seated_at: float | None = None
        self.first_at: float | None = None
        self.last_at: float | None = None

    @property
    def total(self) -> int:
        """Length of the text: prompt and generated tokens."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def reserve(self) -> int:
        """Tokens for which an admission needs pages: the text, and one window if anything is to be generated."""
        return self.total + min(1, self.limit)

    @property
    def one_shot(self) -> bool:
        """It is not held when done, displaces nobody's history and takes nobody's over."""
        placement = self.request.placement
        return not (placement.keep and placement.reuse)

    @property
    def reuses(self) -> bool:
        return self.request.placement.reuse and self.request.prompt_logprobs < 0

    def text(self, start: int, end: int) -> Tokens:
        """Tokens at positions start .. end-1 of the text."""
        prompt = self.request.prompt
        if end <= len(prompt):
            return prompt[start:end]
        return prompt[start:] + tuple(self.generated[max(0, start - len(prompt)):end - len(prompt)])

    def packed_text(self) -> bytes:
        return self.packed_prompt + pack(self.generated) if self.generated else self.packed_prompt

    def packed_slice(self, start: int, end: int) -> bytes:
        """Tokens start .. end-1 of the text as 32-bit integers."""
        prompt = len(self.request.prompt)
        part = self.packed_prompt[WIDTH * start:WIDTH * min(end, prompt)]
        return part + pack(self.generated[max(0, start - prompt):end - prompt]) if end > prompt else part

    def is_waiting_for_prefix(self) -> bool:
        """Somebody else is still reading what this request's prompt begins with."""
        return self.waits_for is not None and self.waits_for.is_still_reading(self.waits_until)

    def is_still_reading(self, until: int) -> bool:
        """It is seated, and its first ``until`` tokens are not in the cache yet."""
        if self.state is not RequestState.SEATED or self.slot is None or self.conversation is None:
            return False
        return self.slot.state is SlotState.RESTORING or len(self.conversation.tokens) < until

    def usage(self, now: float, complete: bool) -> Usage:
        """Counts and times; ``complete`` False (cancelled, failed): ``prompt`` counts only what got into the cache."""
        prompt = len(self.request.prompt)
        if not complete:
            read = len(self.conversation.tokens) if self.conversation is not None else 0
            prompt = min(prompt, max(read, self.cached))
        seated = now if self.seated_at is None else self.seated_at
        first = now if self.first_at is None else self.first_at
        last = first if self.last_at is None else self.last_at
        return Usage(
            prompt=prompt, cached=self.cached, generated=len(self.generated), drafted=self.drafted, accepted=self.accepted,
            queue_s=seated - self.arrived_at, prompt_s=first - seated, decode_s=last - first,
        )


class Slot:
    """One of the ``--batch N`` seats. ``used``: when a request last left it. ``outcome``: what LEAVING leads to."""

    __slots__ = ("id", "group", "state", "run", "conversation", "used", "outcome")

    def __init__(self, number: int, group: int) -> None:
        self.id = number
        self.group = group
        self.state = SlotState.EMPTY
        self.run: Run | None = None
        self.conversation: Conversation | None = None
        self.used = 0.0
        self.outcome = Outcome.HOLD

    @property
    def is_free(self) -> bool:
        return self.state is SlotState.EMPTY or self.state is SlotState.HELD

    @property
    def will_hold(self) -> bool:
        """Its request is over, and its history stays once the last window has reported."""
        if self.state is not SlotState.LEAVING or self.run is None or self.run.state is not RequestState.ENDED:
            return False
        return self.outcome is Outcome.HOLD and not self.run.one_shot

    def step(self, event: SlotEvent) -> None:
        self.state = states.step(states.SLOT, self.state, event)
