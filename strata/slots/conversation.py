"""A conversation: the tokens whose keys and values are in the cache, the pages they lie in, and where it can be resumed.

``tokens`` is exactly what has been fed to windows that reported: the prompt (as far as it was read) and every generated token but
the last. Its full pages may be lent to others and are then immutable; the last, partly filled page is its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from strata.messages import Tokens
from strata.slots import states
from strata.slots.states import ConversationEvent, ConversationState


class Conversation:
    """Owned by ``Memory``. ``slot``: its seat, if it has one. ``claimed``: a request owns it, so nobody else may continue or evict it.

    ``indexed``: how many tokens the prefix index has (the whole prompt from the moment the request sits, so that others can wait for it).
    """

    __slots__ = (
        "id", "tenant", "key", "anchor", "tokens", "pages", "snapshots", "state", "slot", "claimed", "used", "host", "indexed", "_table",
    )

    def __init__(self, number: int, tenant: str, key: str) -> None:
        self.id = number
        self.tenant = tenant
        self.key = key
        self.anchor = 0
        self.tokens = array("i")
        self.pages: list[int] = []
        self.snapshots: list[int] = []
        self.state = ConversationState.BUSY
        self.slot: int | None = None
        self.claimed = True
        self.used = 0.0
        self.host = 0
        self.indexed = 0
        self._table: Tokens | None = None

    def step(self, event: ConversationEvent) -> None:
        self.state = states.step(states.CONVERSATION, self.state, event)

    @property
    def reach(self) -> int:
        """A prompt that shares this many tokens continues the conversation (it may have been cut off before its anchor was read)."""
        return min(self.anchor, len(self.tokens))

    def table(self) -> Tokens:
        """The page table as a tuple, made anew only when a page was added or taken away."""
        if self._table is None:
            self._table = tuple(self.pages)
        return self._table

    def set_pages(self, pages: list[int]) -> None:
        self.pages = pages
        self._table = None

    def add_pages(self, pages: Sequence[int]) -> None:
        self.pages.extend(pages)
        self._table = None

    def cut(self, tokens: int, page_tokens: int) -> list[int]:
        """Forget what lies beyond ``tokens``; returns the pages that are not needed any more, for the caller to release."""
        del self.tokens[tokens:]
        self.snapshots = [position for position in self.snapshots if position <= tokens]
        kept = -(-tokens // page_tokens)
        spare = self.pages[kept:]
        if spare:
            self.set_pages(self.pages[:kept])
        return spare

    def forget(self) -> None:
        """Nothing in the pages is valid any more; the pages themselves stay."""
        del self.tokens[:]
        self.snapshots = []
