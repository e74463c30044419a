"""Drafts from the model's own head (multi-token prediction): which rows its blocks run, and what comes of them.

Theory. A head is one more transformer block. Its row k joins the embedding of token k with the trunk's hidden state of token k - 1, after
the final norm, and guesses token k + 1. A further guess feeds back: the guessed token, and the head's own hidden state after its
norm (feeding back what is before the norm ruins later guesses silently). Where a model has several heads, step i uses head i, which first
reads the drafts before it; further steps stay with the last head. Token 0 is paired with zeros.

Cells. Keys and values of row k lie in cell k of one more layer of the slot's own pages. A window makes its committed tokens certain and
the hidden states before them too, so their cells are written (again, where a draft had stood there before). The cell of the last
pick and those of drafts are provisional: the next window commits them or not, and overwrites them.

Cheapness. All slots go through a step together. Rows of slots that want no drafts are kept back until they do, or until MOST_KEPT of
them are due, so a head that is switched off costs nearly nothing. What is lost when a request ends is a few cells, which the next one
sees as zeros: it is drafted for a little worse.

Early stop. A slot's chain ends before a guess that is hardly worth a row to check (draft_trust.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from strata.engine.draft import Ask
from strata.engine.draft_choice import DraftChoice
from strata.engine.draft_trust import Trust
from strata.engine.mtp_rows import Chain, Kept, Rows, rows_of
from strata.engine.page_hidden import PageHidden
from strata.engine.results import segment_rows
from strata.engine.sampling import BROKEN
from strata.messages import DraftSource, Segment, SegmentResult, Tokens, Window

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
MOST_KEPT = 32


class MtpBlock(Protocol):
    """One head, wherever it is computed."""

    def run(self, window: Window, hidden: Floats, wanted: Sequence[int]) -> tuple[Floats, Floats]:
        """Rows of ``window``, each with the hidden state of the token before it, float32 [rows, width]; their cells are written.

        Of the ``wanted`` rows: hidden states after the head's norm, float32 [wanted, width], and logits [wanted, draft vocabulary].
        """

    def admit(self, places: Ids, tokens: Ids) -> None:
        """These places of the draft vocabulary are for these tokens from now on."""


class Trunk(Protocol):
    """The last stage's model. ``last_hidden`` float32 [rows, width]: of the window just run, after the final norm, not written to again."""

    @property
    def last_hidden(self) -> Floats: ...


class MtpSource:
    """``blocks``: the model's heads, in order. ``pages`` keeps hidden states between windows, and is filled here."""

    name: DraftSource = "mtp"

    def __init__(self, blocks: Sequence[MtpBlock], trunk: Trunk, pages: PageHidden, choose: DraftChoice) -> None:
        self.trust = Trust()
        self._blocks, self._trunk, self._pages, self._choose = tuple(blocks), trunk, pages, choose
        self._kept: dict[int, Kept] = {}
        self._kind: Literal["decode", "prompt"] = "decode"

    # ---- what a window made certain

    def observe(self, window: Window, results: Sequence[SegmentResult]) -> None:
        hidden, seen = self._trunk.last_hidden, list[int]()
        self._kind = window.kind
        for kept in self._kept.values():
            kept.segment = None
        for (segment, first), result in zip(segment_rows(window), results, strict=True):
            self.trust.checked(segment, result)
            if result.error or not segment.request_id:  # a pad row is nobody's
                self._kept.pop(segment.slot, None)
                continue
            certain = len(segment.tokens) - segment.num_drafts + result.accepted
            self._keep(segment, hidden[first:first + certain])
            seen += (*segment.tokens[:certain], *result.picks[-1:])
        self._admit(seen)

    def _admit(self, seen: Sequence[int]) -> None:
        vocabulary = self._choose.vocabulary
        if vocabulary is not None:
            places = vocabulary.see(seen)
            for block in self._blocks if len(places) else ():
                block.admit(places, vocabulary.ids[places])

    def _keep(self, segment: Segment, hidden: Floats) -> None:
        """``hidden`` of the tokens of ``segment`` that are certain."""
        kept = self._kept.get(segment.slot)
        if kept is None or kept.request_id != segment.request_id or kept.end != segment.start:
            kept = self._kept[segment.slot] = Kept(segment.request_id, segment.start)
        kept.segment = segment
        kept.tokens += segment.tokens[:len(hidden)]
        kept.hidden += [self._pages.before(segment.pages, segment.start), hidden[:-1]]
        self._pages.store(segment.pages, segment.start, hidden)

    # ---- drafts

    def propose(self, asks: Sequence[Ask]) -> list[Tokens]:
        chains = [self._chain(ask) for ask in asks]
        running = [chain for chain in chains if chain.room > 0]
        rows, kind, step = self._due(running), self._kind, 0
        while rows:
            window = Window(0, kind, 0, tuple(segment for segment, _ in rows))
            hidden = np.concatenate([each for _, each in rows])
            wanted = np.cumsum([len(each) for _, each in rows[:len(running)]]) - 1
            found = self._blocks[min(step, len(self._blocks) - 1)].run(window, hidden, wanted.tolist())
            for other in self._blocks[1:] if step == 0 else ():
                other.run(window, hidden, ())
            running = self._extend(running, *found)
            step += 1
            kind = "decode"
            rows = [chain.rows(0 if step < len(self._blocks) else step) for chain in running]
        for chain in chains:
            self.trust.proposed(chain.ask.segment, chain.drafts, chain.sorts)
        return [chain.drafts for chain in chains]

    def _chain(self, ask: Ask) -> Chain:
        """A chain without drafts. Its cells have to lie in pages that the slot has already."""
        pages = ask.segment.pages
        room = len(pages) * self._pages.page_tokens - ask.position
        return Chain(ask, min(ask.limit, room), [ask.picks[-1]], [self._pages.before(pages, ask.position)])

    def _due(self, running: Sequence[Chain]) -> list[Rows]:
        """Rows of the first step: for each chain what was kept back and its pick; then what was kept back for long enough elsewhere."""
        due = []
        for chain in running:
            first, tokens, hidden = self._kept[chain.ask.segment.slot].take()
            due.append(rows_of(chain.ask.segment, first, tokens + chain.tokens, hidden + chain.hidden))
        for kept in self._kept.values():
            if kept.segment is not None and len(kept.tokens) >= MOST_KEPT:
                due.append(rows_of(kept.segment, *kept.take()))
        return due

    def _extend(self, running: Sequence[Chain], hidden: Floats, logits: Floats) -> list[Chain]:
        """Give each chain its next draft, if that is worth it; the chains that go on."""
        going = []
        choices = self._choose(logits, [(chain.ask, chain.drafts) for chain in running])
        for index, (chain, (token, probability)) in enumerate(zip(running, choices, strict=True)):
            sort = self.trust.sort(probability, chain.ask.is_drawn)
            chain.chance *= self.trust.chance(sort)
            if token == BROKEN or not self.trust.is_worth(chain.chance, sort):
                continue
            chain.tokens.append(token)
            chain.hidden.append(hidden[index:index + 1])
            chain.sorts.append(sort)
            if len(chain.sorts) < chain.room and self.trust.goes_on(chain.chance):
                going.append(chain)
        return going
