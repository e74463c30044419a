"""Admission: which history a request goes on from, which seat it gets, and whether its pages can be had.

A request whose common prefix reaches a conversation's anchor (the end of the last user turn that was read) *continues* it,
even if the client dropped or re-rendered the reply after that. One that shares less *borrows* the full pages it shares and sits
elsewhere, so strangers with the same system prompt never take each other's conversation. What somebody else is reading just now is worth
waiting for: reading it twice never pays. So is a conversation whose last window is still in flight: a client that stopped an answer may be
back sooner than that window.
The order matters: the source is chosen and secured first, then room is made, so making room cannot delete what the request needs.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from strata.messages import Progress
from strata.slots import states
from strata.slots.conversation import Conversation
from strata.slots.match import WIDTH
from strata.slots.memory import ON_DEVICE, Memory
from strata.slots.policy import Seat, SlotPolicy, pick_slot
from strata.slots.slot import Run, Slot
from strata.slots.states import ConversationState, RequestEvent, SlotEvent


class Verdict(Enum):
    """SEATED; WAIT: not now, but others may go first; BLOCKED: nobody behind it may go first (pages, or no seat at all)."""

    SEATED = "seated"
    WAIT = "wait"
    BLOCKED = "blocked"


class Source(NamedTuple):
    """Where a request starts: ``resume`` tokens of ``conversation``, taken over (``continues``) or borrowed. ``common``: tokens shared."""

    conversation: Conversation | None = None
    resume: int = 0
    continues: bool = False
    common: int = 0

    @property
    def is_parked(self) -> bool:
        return self.conversation is not None and self.conversation.state is ConversationState.PARKED


Relatives = list[tuple[int, Conversation]]


class Seating:
    """Decides and carries out the seating of one request; the queue is the machine's."""

    def __init__(self, policy: SlotPolicy, groups: int, memory: Memory, slots: list[Slot]) -> None:
        self.policy = policy
        self.groups = groups
        self.memory = memory
        self.slots = slots

    def try_seat(self, run: Run, now: float, headroom: int) -> Verdict:
        """Seat ``run`` if a seat and its pages (the text, one window, and ``headroom`` pages that must stay free) can be had."""
        pinned = run.request.placement.slot
        if pinned is not None and not self.slots[pinned].is_free:
            return Verdict.WAIT
        source = self._find(run)
        if source is None:
            return Verdict.WAIT
        if source.is_parked and not source.resume:
            source = Source()  # an image of which nothing can be used is not worth a copy
        slot = self.slots[pinned] if pinned is not None else self._pick(source, now)
        if slot is None or not self._take(run, slot, source, now, headroom):
            return Verdict.BLOCKED
        return Verdict.SEATED

    # ---- which history

    def _find(self, run: Run) -> Source | None:
        """The best history to start from; None: it is being read or copied just now, so wait."""
        if run.conversation is not None:
            return Source(run.conversation, len(run.conversation.tokens), True) if self._is_parked(run.conversation) else None
        if not run.reuses:
            return Source()
        tenant = run.request.placement.tenant
        known = self.memory.conversations
        relatives = [
            (common, known[owner]) for common, owners in self.memory.index.match(run.packed_text()) for owner in owners
            if known[owner].tenant == tenant
        ]
        own, lent = self._continuation(run, relatives), self._lender(run, relatives)
        run.waits_for, run.waits_until = self._promise(run, relatives, max(own.resume, lent.resume))
        if run.waits_for is not None:
            return None
        if own.conversation is not None and own.resume >= lent.resume:
            return None if own.conversation.claimed or own.conversation.state is ConversationState.PARKING else own
        return lent if lent.resume else Source()

    @staticmethod
    def _is_parked(conversation: Conversation) -> bool:
        return conversation.state is ConversationState.PARKED

    def _continuation(self, run: Run, relatives: Relatives) -> Source:
        """The conversation this prompt is the next turn of: the client's own key first, then the longest match, then the nearest."""
        key = run.request.placement.key
        best, rank = Source(), (False, 0, 0, 0.0)
        if run.one_shot:
            return best
        for common, one in relatives:
            if (one.claimed and not self._is_leaving(one)) or not 0 < one.reach <= common or (key and one.key and one.key != key):
                continue
            nearness = 2 if one.state is ConversationState.HELD else int(one.state is ConversationState.SHELVED)
            this = (bool(key) and one.key == key, common, nearness, one.used)
            if this > rank:
                best, rank = Source(one, 0, True, common), this
        if best.conversation is None:
            return best
        return best._replace(resume=self.memory.resume_point(best.conversation, min(best.common, run.total - 1), own=True))

    def _is_leaving(self, conversation: Conversation) -> bool:
        return conversation.slot is not None and self.slots[conversation.slot].will_hold

    def _lender(self, run: Run, relatives: Relatives) -> Source:
        """Who has the most full pages of this prompt, device before host memory. ``relatives`` come longest first."""
        best = Source()
        for common, one in relatives:
            if common < best.resume or (common == best.resume and not best.is_parked):
                break
            if one.state in ON_DEVICE or one.state is ConversationState.PARKED:
                resume = self.memory.resume_point(one, min(common, run.total - 1), own=False)
                if resume > best.resume or (resume == best.resume > 0 and best.is_parked and one.state in ON_DEVICE):
                    best = Source(one, resume, False, common)
        return best

    def _promise(self, run: Run, relatives: Relatives, have: int) -> tuple[Run | None, int]:
        """Who is about to have read most of this prompt, a page or more beyond the ``have`` tokens that there are now, and how much.

        Where only snapshots can be gone on from, what has been read may turn out to hold none; it is waited for all the same, as the
        engine is busy with it anyway, and once.
        """
        size = self.memory.facts.page_tokens
        best: tuple[Run | None, int] = None, have + size - 1
        for common, one in relatives:
            until = min(common, run.total - 1) // size * size
            if until <= best[1]:
                break
            other = self.slots[one.slot].run if one.claimed and one.slot is not None else None
            if other is not None and other.is_still_reading(until):
                best = other, until
        return best

    # ---- which seat

    def _pick(self, source: Source, now: float) -> Slot | None:
        continued = source.conversation if source.continues else None
        seats = [
            Seat(
                not slot.is_free,
                len(slot.conversation.tokens) if slot.conversation is not None else 0,
                slot.used,
                source.common if continued is not None and slot.conversation is continued else 0,
            )
            for slot in self.slots
        ]
        number = pick_slot(seats, self.groups, now=now, low_first=self.policy.low_first, expire_s=self.policy.expire_s)
        return None if number is None else self.slots[number]

    # ---- its pages

    def _take(self, run: Run, slot: Slot, source: Source, now: float, headroom: int) -> bool:
        """Secure the source, make room, and sit down; False (and nothing taken) where the pages cannot be had now."""
        one = source.conversation
        if one is None:
            return self._make_room_and_sit(run, slot, source, now, headroom)
        # What the request goes on from must not be the victim of the room that is made for it.
        was_claimed = one.claimed
        one.claimed |= source.continues
        self.memory.host.add_reader(one)
        is_seated = self._make_room_and_sit(run, slot, source, now, headroom)
        self.memory.host.drop_reader(one)
        if not is_seated:
            one.claimed = was_claimed
        return is_seated

    def _make_room_and_sit(self, run: Run, slot: Slot, source: Source, now: float, headroom: int) -> bool:
        memory, restoring = self.memory, source.is_parked
        own = source.conversation if source.continues else None
        kept = 0 if restoring else memory.pages_for(source.resume)
        shared = source.conversation.pages[:kept] if source.conversation is not None and own is None else []
        spare = memory.pages.num_exclusive(own.pages[kept:]) if own is not None else 0
        need = memory.pages_for(run.reserve) - kept
        memory.pages.share(shared)
        if not self._make_room(run, slot, own, need + headroom - spare, shared, now):
            memory.pages.release(shared)
            return False
        if own is not None:
            conversation = own
            memory.pages.release(own.cut(source.resume, memory.facts.page_tokens))
            memory.seat(own, slot)
        else:
            conversation = self._borrow(run, source, shared)
        conversation.add_pages(memory.pages.allocate(need))
        self._sit(run, slot, conversation, restoring)
        self._announce(run, source, restoring, now)
        if restoring and source.conversation is not None:
            memory.restore(conversation, source.conversation, source.resume)
        return True

    def _make_room(self, run: Run, slot: Slot, own: Conversation | None, count: int, shared: list[int], now: float) -> bool:
        """Free the seat and ``count`` pages, or nobody's where they cannot be had. ``shared``: pages that are borrowed already."""
        memory, keep = self.memory, self.policy.shelf or run.one_shot
        if not memory.can_have(count, shared):
            return False
        if not keep:
            # Without a shelf the history that loses its seat is the first to lose its pages.
            self._empty(slot, own, keep)
        if not memory.make_room(count, now, gentle=run.one_shot):
            return False
        self._empty(slot, own, keep)
        return True

    def _empty(self, slot: Slot, own: Conversation | None, keep: bool) -> None:
        if slot.conversation is not None and slot.conversation is not own:
            self.memory.unseat(slot.conversation, keep)

    def _borrow(self, run: Run, source: Source, shared: list[int]) -> Conversation:
        """A new conversation that begins with what it borrows (possibly nothing)."""
        placement, size = run.request.placement, self.memory.facts.page_tokens
        conversation = self.memory.new(placement.tenant, placement.key)
        conversation.set_pages(shared)
        conversation.tokens.frombytes(memoryview(run.packed_text())[:source.resume * WIDTH])
        if source.conversation is not None:
            points = source.conversation.snapshots
            conversation.snapshots = [point for point in points if point <= source.resume and point % size == 0]
        return conversation

    def _sit(self, run: Run, slot: Slot, conversation: Conversation, restoring: bool) -> None:
        request = run.request
        conversation.claimed, conversation.slot, conversation.anchor = True, slot.id, request.anchor
        conversation.key = request.placement.key or conversation.key
        self.memory.index_text(conversation, run.packed_text())
        run.state = states.step(states.REQUEST, run.state, RequestEvent.SEAT)
        run.conversation, run.slot, run.waits_for = conversation, slot, None
        run.submitted = len(conversation.tokens)
        slot.step(SlotEvent.SEAT_AND_RESTORE if restoring else SlotEvent.SEAT)
        slot.run, slot.conversation = run, conversation

    def _announce(self, run: Run, source: Source, restoring: bool, now: float) -> None:
        """Count a first seating and tell the client; a preempted request that comes back is neither."""
        if run.seated_at is not None:
            return
        assert run.slot is not None and run.conversation is not None
        run.origin = run.conversation.id, source.conversation.id if source.conversation is not None else 0, source.common
        counters, total = self.memory.counters, len(run.request.prompt)
        run.seated_at, run.cached = now, source.resume
        kind = "restored" if restoring else "continued" if source.continues else "borrowed"
        counters.reuse[kind if run.cached else "none"] += 1
        counters.prompt_tokens += total
        counters.cached_tokens += run.cached
        self.memory.out.append(Progress(run.request.id, run.cached, total, run.cached, run.slot.id))
