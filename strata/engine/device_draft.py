"""Drafts from the model's own head where its trunk runs on a device: tokens and hidden rows stay there from step to step.

What is drafted and why is told in mtp.py; this is the same source for devices, where waiting for a token costs more than computing it. So
a chain of steps is enqueued whole, each step reading the token that the one before has left, and is read once, at its end. A guess that
is not worth a row cuts it then: the steps behind are lost, not waited for. Penalties in a chain know what is certain, not its own drafts.

Hidden rows are numbers here: places in one store (device_space.DraftSpace), from which kernels take them. Rows of slots that want no
drafts, which the next window would overwrite, move to places of their slot. Of several heads the first drafts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from strata.engine.device_chain import ChainRunner, Guess, Start
from strata.engine.device_space import MOST_KEPT
from strata.engine.draft import Ask
from strata.engine.draft_trust import Trust
from strata.engine.draft_upload import DraftSender
from strata.engine.results import segment_rows
from strata.messages import DraftSource, EngineFacts, Segment, SegmentResult, Tokens, Window

NOTHING = -1  # instead of a hidden row's number: zeros


@dataclass(slots=True)
class Kept:
    """What is certain of a request and not in its cells yet: ``tokens`` from position ``first`` on, ``sources`` of the hidden rows before
    them. ``segment``: of the window just run, None where the slot was not in it; ``last``: the hidden row of its last certain token."""

    request_id: str
    first: int
    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    segment: Segment | None = None
    last: int = NOTHING

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)


class DeviceMtp:
    """Implements draft.Source."""

    name: DraftSource = "mtp"

    def __init__(self, runner: ChainRunner, sender: DraftSender, facts: EngineFacts) -> None:
        self.trust = Trust()
        self._runner, self._sender, self._facts, self._space = runner, sender, facts, runner.ops.space
        self._kept: dict[int, Kept] = {}
        self._page_moves: list[tuple[int, int]] = []

    # ---- what a window made certain

    def observe(self, window: Window, results: Sequence[SegmentResult]) -> None:
        self._page_moves = []
        for kept in self._kept.values():
            kept.segment = None
        for (segment, first), result in zip(segment_rows(window), results, strict=True):
            self.trust.checked(segment, result)
            if result.error or not segment.request_id:  # a pad row is nobody's
                self._kept.pop(segment.slot, None)
                continue
            self._keep(segment, first, len(segment.tokens) - segment.num_drafts + result.accepted)

    def _keep(self, segment: Segment, first: int, certain: int) -> None:
        """The first ``certain`` tokens of ``segment``, whose rows of the window count from ``first``."""
        kept = self._kept.get(segment.slot)
        if kept is None or kept.request_id != segment.request_id or kept.end != segment.start:
            kept = self._kept[segment.slot] = Kept(segment.request_id, segment.start)
        kept.segment, kept.last = segment, first + certain - 1
        kept.tokens += segment.tokens[:certain]
        kept.sources += [self._before(segment), *range(first, first + certain - 1)]
        size, end = self._facts.page_tokens, segment.start + certain
        for place in range(segment.start // size, (end - 1) // size + 1):
            row = first + min((place + 1) * size, end) - 1 - segment.start
            self._page_moves.append((row, self._space.pages_at + segment.pages[place]))

    def _before(self, segment: Segment) -> int:
        """The hidden row before a segment: the last in the page that ends, or was left, there."""
        if segment.start == 0:
            return NOTHING
        return self._space.pages_at + segment.pages[(segment.start - 1) // self._facts.page_tokens]

    # ---- drafts

    def propose(self, asks: Sequence[Ask]) -> list[Tokens]:
        """Kept rows are moved before, and the pages' rows after, rows of both are read; a chain reads only the window's."""
        starts = [start for start in map(self._start, asks) if start is not None]
        starts.sort(key=lambda start: -start.room)
        slots = [start.ask.segment.slot for start in starts]
        due = self._due(slots)
        parking, paging = self._sender.send_moves(self._parked(), self._page_moves)
        self._runner.ops.move(parking)
        self._fill(due)
        self._runner.ops.move(paging)
        drafts = {
            start.ask.segment.slot: self._cut(start.ask, guesses)
            for start, guesses in zip(starts, self._runner.run(starts) if starts else ())
        }
        return [drafts.get(ask.segment.slot, ()) for ask in asks]

    def _start(self, ask: Ask) -> Start | None:
        """Its cells have to lie in pages that the slot has already."""
        pages = ask.segment.pages
        room = min(ask.limit, self._facts.max_drafts, len(pages) * self._facts.page_tokens - ask.position)
        return Start(ask, room, self._kept[ask.segment.slot].last) if room > 0 else None

    def _due(self, slots: Sequence[int]) -> list[Kept]:
        """What has to be filled now, taken from what is kept: of ``slots``, which draft, and then what was kept back for long enough."""
        others = [slot for slot, kept in self._kept.items() if kept.segment is not None and len(kept.tokens) >= MOST_KEPT]
        due = []
        for slot in dict.fromkeys((*slots, *others)):
            kept = self._kept[slot]
            due.append(replace(kept))
            kept.first, kept.tokens, kept.sources = kept.end, [], []
        return due

    def _parked(self) -> list[tuple[int, int]]:
        """Moves of what is kept on to the places of its slot, where the next window does not write."""
        moves = []
        for slot, kept in self._kept.items():
            own = self._space.kept_at + slot * MOST_KEPT
            for place, source in enumerate(kept.sources):
                if NOTHING < source < self._space.kept_at:
                    moves.append((source, own + place))
                    kept.sources[place] = own + place
        return moves

    def _fill(self, due: Sequence[Kept]) -> None:
        """Cells of these rows; their slots' page tables are the lines that a chain finds, too."""
        if due:
            self._sender.send_tables([kept.segment.pages for kept in due if kept.segment is not None])
        rows = [
            (token, kept.first + place, line, source)
            for line, kept in enumerate(due) for place, (token, source) in enumerate(zip(kept.tokens, kept.sources, strict=True))
        ]  # fmt: skip
        self._runner.fill(rows)

    def _cut(self, ask: Ask, guesses: Sequence[Guess]) -> Tokens:
        """The drafts among the guesses of a chain: those before the first that is not worth a row."""
        usable = list(takewhile(lambda guess: guess[0] >= 0, guesses))
        sorts = [self.trust.sort(probability, ask.is_drawn) for _, probability in usable]
        count = self.trust.worth(sorts)
        drafts = tuple(token for token, _ in usable[:count])
        self.trust.proposed(ask.segment, drafts, sorts[:count])
        return drafts
