"""The books of parked conversations: which images lie in host memory, how large they are, and which may go.

The limit counts the incoming image; the oldest ones go first. Images of preempted requests are always taken (a running answer is not
lost for a cache limit) but count like the others. An image that a restore is reading stays until that copy has reported.
"""

from __future__ import annotations

from collections import Counter

from strata.slots.conversation import Conversation
from strata.slots.states import ConversationState


class HostStore:
    """Sizes in bytes. ``free``: free host memory as last reported, None where nobody looks (then there is no floor)."""

    def __init__(self, limit: int, floor: int, page_bytes: int) -> None:
        self.limit = limit
        self.floor = floor
        self.page_bytes = page_bytes
        self.free: int | None = None
        self.used = 0
        self._images: dict[int, tuple[Conversation, int]] = {}
        self._readers: Counter[int] = Counter()
        self._last_handle = 0

    def bytes_of(self, num_pages: int) -> int:
        return num_pages * self.page_bytes

    @property
    def fits(self) -> bool:
        return 0 < self.limit >= self.used

    @property
    def num_images(self) -> int:
        return len(self._images)

    def _removable(self) -> list[tuple[Conversation, int]]:
        return [
            (one, size) for one, size in self._images.values()
            if one.state is ConversationState.PARKED and not one.claimed and not self._readers[one.id]
        ]

    def can_take(self, size: int) -> bool:
        """Whether an image of this size may come in, after others have gone for it."""
        if size > self.limit or self.limit == 0 or (self.free is not None and self.free - size < self.floor):
            return False
        return self.used - sum(image for _, image in self._removable()) + size <= self.limit

    def make_room(self, size: int) -> list[Conversation]:
        """The parked conversations that must go, oldest first, before an image of this size comes in."""
        going, used = [], self.used
        for one, image in sorted(self._removable(), key=lambda item: (item[0].used, item[0].id)):
            if used + size <= self.limit:
                break
            going.append(one)
            used -= image
        return going

    def put(self, conversation: Conversation, num_pages: int) -> None:
        self._last_handle += 1
        conversation.host = self._last_handle
        size = self.bytes_of(num_pages)
        self._images[conversation.host] = conversation, size
        self.used += size
        if self.free is not None:
            self.free -= size

    def remove(self, conversation: Conversation) -> None:
        _, size = self._images.pop(conversation.host)
        self.used -= size
        conversation.host = 0

    def add_reader(self, conversation: Conversation) -> None:
        self._readers[conversation.id] += 1

    def drop_reader(self, conversation: Conversation) -> None:
        self._readers[conversation.id] -= 1
        if not self._readers[conversation.id]:
            del self._readers[conversation.id]

    def has_readers(self, conversation: Conversation) -> bool:
        return conversation.id in self._readers
