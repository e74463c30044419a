"""Where conversations live: on device pages (busy, held in a slot, shelved) or parked in host memory; who leaves when room is short.

Losing a seat is not losing the history. A conversation leaves the device only under pressure: by the eviction rule, first to host
memory as far as its limit allows (the oldest image goes for the incoming one), else for good. Copies take time, so making room may
end with "later": the pages of a conversation that is being copied out are free when the copy has reported, not before.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.messages import CopyDone, EngineFacts, PageCopy
from strata.slots.conversation import Conversation
from strata.slots.events import Command, IllegalEvent
from strata.slots.host import HostStore
from strata.slots.match import WIDTH, PrefixIndex
from strata.slots.pages import PageAllocator
from strata.slots.policy import SlotPolicy, eviction_key
from strata.slots.slot import Slot
from strata.slots.states import ConversationEvent, ConversationState, SlotEvent
from strata.slots.view import Counters

IDLE = (ConversationState.HELD, ConversationState.SHELVED)
ON_DEVICE = (ConversationState.BUSY, ConversationState.HELD, ConversationState.SHELVED, ConversationState.PARKING)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy in flight. ``source``: the parked conversation a restore reads from (itself, or one that only lends)."""

    conversation: Conversation
    source: Conversation | None
    freeing: int = 0


class Memory:
    """Owner of every conversation, page, and copy. Commands are appended to ``out``."""

    def __init__(self, facts: EngineFacts, policy: SlotPolicy, slots: list[Slot], out: list[Command], counters: Counters) -> None:
        self.facts = facts
        self.policy = policy
        self.slots = slots
        self.out = out
        self.counters = counters
        self.pages = PageAllocator(facts.num_pages)
        self.host = HostStore(policy.cache_bytes, policy.host_floor, facts.page_bytes)
        self.index = PrefixIndex()
        self.conversations: dict[int, Conversation] = {}
        self.transfers: dict[int, Transfer] = {}
        self.freeing = 0
        self._last_id = 0
        self.pad_page = self.pages.allocate(1)[0] if policy.rows == "prefix" else -1

    @property
    def num_usable(self) -> int:
        return self.pages.num_pages - (self.pad_page >= 0)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.facts.page_tokens)

    def new(self, tenant: str, key: str) -> Conversation:
        self._last_id += 1
        conversation = Conversation(self._last_id, tenant, key)
        self.conversations[conversation.id] = conversation
        return conversation

    def resume_point(self, conversation: Conversation, limit: int, own: bool) -> int:
        """The last position up to ``limit`` from which the history can be resumed: by its owner in place, or by a borrower.

        A borrower gets full pages only. The owner may also go on inside a page: at the live end (that page is never shared), or at a
        snapshot if nobody else has the page. A state that cannot be cut resumes only where the engine reported a snapshot.
        """
        size = self.facts.page_tokens
        length = len(conversation.tokens)
        if not self.facts.snapshots:
            return length if own and length <= limit else min(limit, length) // size * size
        for point in sorted(conversation.snapshots, reverse=True):
            if point <= min(limit, length) and (point % size == 0 or (own and self._is_private(conversation, point // size))):
                return point
        return 0

    def _is_private(self, conversation: Conversation, place: int) -> bool:
        return not conversation.pages or self.pages.refs[conversation.pages[place]] == 1

    def can_have(self, count: int, borrowed: list[int]) -> bool:
        """Whether ``count`` pages would be free if every idle conversation left and every copy had reported; else nobody need leave.

        ``borrowed``: pages that stay, whoever of their owners leaves.
        """
        staying = [one.pages for one in self.conversations.values() if one.claimed and one.state is not ConversationState.PARKING]
        staying.append(borrowed)
        most = self.num_usable - count
        # Pages that are shared count twice in the sum, which is cheaper than the set and usually enough.
        return self.pages.num_free >= count or sum(map(len, staying)) <= most or len(set().union(*staying)) <= most

    def make_room(self, count: int, now: float, gentle: bool = False) -> bool:
        """Evict idle conversations until ``count`` pages are free or will be when the copies in flight have reported.

        True: they are free now. ``gentle`` (for requests that shall displace nobody) takes the shortest histories first.
        """
        while self.pages.num_free + self.freeing < count:
            victim = self._pick_victim(now, gentle)
            if victim is None:
                return False
            self.evict(victim, "memory")
        return self.pages.num_free >= count

    def _pick_victim(self, now: float, gentle: bool) -> Conversation | None:
        idle = [one for one in self.conversations.values() if one.state in IDLE and not one.claimed]
        if gentle:
            idle.sort(key=lambda one: (len(one.tokens), one.used))
        else:
            idle.sort(key=lambda one: eviction_key(len(one.tokens), one.used, now, self.policy.expire_s))
        # A history whose pages are all borrowed frees nothing by itself: it goes only when nothing better is left.
        return next((one for one in idle if self.pages.has_exclusive(one.pages)), idle[0] if idle else None)

    def unseat(self, conversation: Conversation, keep: bool) -> None:
        """Take a held conversation out of its seat: onto the shelf, or out where there is none (``keep`` False)."""
        self._vacate(conversation)
        self.counters.unseated += 1
        if not keep:
            self.evict(conversation, "seat")
            return
        shelved = [one for one in self.conversations.values() if one.state is ConversationState.SHELVED and not one.claimed]
        if len(shelved) > self.policy.shelf_limit:
            self.evict(min(shelved, key=lambda one: one.used), "shelf_full")

    def _vacate(self, conversation: Conversation) -> None:
        assert conversation.slot is not None
        slot = self.slots[conversation.slot]
        slot.step(SlotEvent.VACATE)
        slot.conversation = conversation.slot = None
        conversation.step(ConversationEvent.UNSEAT)

    def seat(self, conversation: Conversation, slot: Slot) -> None:
        """Take an idle conversation into use in ``slot``, wherever it was; moving it moves only its page table."""
        if conversation.slot is not None and conversation.slot != slot.id:
            self._vacate(conversation)
        if conversation.state in IDLE:
            conversation.step(ConversationEvent.SEAT)

    def grow(self, conversation: Conversation, tokens: int, now: float) -> bool:
        """Pages for ``tokens`` tokens; False where none can be had now."""
        missing = self.pages_for(tokens) - len(conversation.pages)
        if missing <= 0:
            return True
        if not self.make_room(missing, now):
            return False
        conversation.add_pages(self.pages.allocate(missing))
        return True

    def evict(self, conversation: Conversation, reason: str) -> None:
        """An idle conversation leaves the device: to host memory if that takes it, else for good."""
        if conversation.state is ConversationState.HELD:
            self._vacate(conversation)
        image = self.host.bytes_of(len(conversation.pages))
        if self.host.can_take(image):
            for other in self.host.make_room(image):
                self.drop(other, "host_full")
            self.park(conversation)
        else:
            self.drop(conversation, reason)

    def park(self, conversation: Conversation) -> None:
        """Copy the pages out; they are free when the copy has reported."""
        conversation.step(ConversationEvent.PARK)
        self.host.put(conversation, len(conversation.pages))
        freeing = self.pages.num_exclusive(conversation.pages)
        self.freeing += freeing
        self._copy("out", conversation.host, conversation.pages, Transfer(conversation, None, freeing))

    def restore(self, conversation: Conversation, source: Conversation, tokens: int) -> None:
        """Copy the first ``tokens`` tokens of ``source``'s image into ``conversation``'s pages, which are allocated already."""
        conversation.step(ConversationEvent.RESTORE)
        self.host.add_reader(source)
        self._copy("in", source.host, conversation.pages[:self.pages_for(tokens)], Transfer(conversation, source))

    def _copy(self, direction: str, host: int, pages: list[int], transfer: Transfer) -> None:
        self._last_id += 1
        self.transfers[self._last_id] = transfer
        self.out.append(PageCopy(self._last_id, "out" if direction == "out" else "in", host, tuple(pages)))

    def copy_done(self, event: CopyDone) -> Conversation:
        """Book the end of a copy; returns the conversation that was copied (its state says how that went)."""
        if event.copy_id not in self.transfers:
            raise IllegalEvent(f"copy {event.copy_id} is not in flight")
        transfer = self.transfers.pop(event.copy_id)
        if transfer.source is None:
            self._copied_out(transfer, event.error)
        else:
            self._copied_in(transfer.conversation, transfer.source, event.error)
        return transfer.conversation

    def _copied_out(self, transfer: Transfer, error: str) -> None:
        conversation = transfer.conversation
        self.freeing -= transfer.freeing
        self.pages.release(conversation.pages)
        conversation.set_pages([])
        if error:
            self.drop(conversation, "copy_failed")
            return
        conversation.step(ConversationEvent.PARKED)
        self.counters.parked += 1
        if not conversation.claimed and not self.host.fits:
            # Its request was cancelled meanwhile: a preempted conversation was let in over the limit, an idle one is not.
            self.drop(conversation, "host_full")

    def _copied_in(self, conversation: Conversation, source: Conversation, error: str) -> None:
        conversation.step(ConversationEvent.RESTORED)
        self.host.drop_reader(source)
        if error:
            # The pages are there but hold nothing: the text is read from its beginning. A bad image is not tried twice.
            conversation.forget()
            if source is not conversation and not self.host.has_readers(source) and not source.claimed:
                self.drop(source, "copy_failed")
        else:
            self.counters.restored += 1
        if source is conversation:
            self._drop_image(conversation)

    def drop(self, conversation: Conversation, reason: str = "") -> None:
        """Forget a conversation for good; counted as an eviction where a ``reason`` is given."""
        conversation.step(ConversationEvent.DROP)
        self.index.remove(conversation.id)
        self.pages.release(conversation.pages)
        conversation.set_pages([])
        self._drop_image(conversation)
        del self.conversations[conversation.id]
        if reason:
            self.counters.evictions[reason] += 1

    def _drop_image(self, conversation: Conversation) -> None:
        if conversation.host:
            self._last_id += 1
            self.out.append(PageCopy(self._last_id, "drop", conversation.host))
            self.host.remove(conversation)

    def index_text(self, conversation: Conversation, packed: bytes) -> None:
        """Make the conversation findable by a text that it is about to have read."""
        self.index.put(conversation.id, packed)
        conversation.indexed = len(packed) // WIDTH

    def index_tokens(self, conversation: Conversation) -> None:
        """Make the conversation findable by exactly what it holds; usually only the answer is new."""
        length = len(conversation.tokens)
        if length < conversation.indexed:
            self.index.put(conversation.id, conversation.tokens.tobytes())
        else:
            self.index.extend(conversation.id, conversation.tokens[conversation.indexed:].tobytes())
        conversation.indexed = length

    def cut_to_resume_point(self, conversation: Conversation) -> None:
        """Forget what could not be resumed anyway, because the state at the live end goes with the seat."""
        point = self.resume_point(conversation, len(conversation.tokens), own=True)
        self.pages.release(conversation.cut(point, self.facts.page_tokens))

    def release_spare(self, conversation: Conversation) -> None:
        """Give back the pages beyond the last token (an admission reserves more than a short answer needs)."""
        self.pages.release(conversation.cut(len(conversation.tokens), self.facts.page_tokens))

    def trim_host(self) -> None:
        """After a preempted request was cancelled its image is an ordinary one, and the limit holds for it."""
        for other in self.host.make_room(0):
            self.drop(other, "host_full")

    @property
    def is_copying_out(self) -> bool:
        return any(transfer.source is None for transfer in self.transfers.values())

    def page_counts(self) -> tuple[int, int, int, int]:
        """Pages (free, busy, held, shelved); a shared page counts where it is needed most. Sums to all pages."""
        owned: dict[str, set[int]] = {"busy": set(), "held": set(), "shelved": set()}
        for one in self.conversations.values():
            kind = one.state.value if one.state in IDLE else "busy"
            owned[kind].update(one.pages)
        busy = owned["busy"] | ({self.pad_page} if self.pad_page >= 0 else set())
        held = owned["held"] - busy
        return self.pages.num_free, len(busy), len(held), len(owned["shelved"] - busy - held)
