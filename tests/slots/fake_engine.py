"""An engine driven by hand whose tokens depend on everything that was written to the cache, read through the page table.

Each position's cell holds a digest of the whole context up to it, computed from the digest *found in the cache* at the position before.
So a wrong page, a lost token, a stale read or a page that was reused too early shows as a wrong token, and ``expected`` says which
tokens are right, from the prompt alone. Windows and copies wait until the test lands them; ``eager`` engines touch the cache when they are
sent, others when they land, so a machine that is right with both does not depend on when in between it happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from strata.messages import (
    CopyDone, DraftSource, EngineFacts, PageCopy, Segment, SegmentResult, TokenLogprob, Tokens, Window, WindowDone,
)
from strata.request import Request

Drafter = Callable[[Segment, list[int]], tuple[Tokens, DraftSource]]
"""Drafts for a segment, given what the model will really pick next (as many as anybody may want)."""

VOCABULARY = 50
EMPTY = 1469598103934665603


def digest(before: int, token: int, position: int) -> int:
    return ((before ^ (token * 31 + position + 1)) * 1099511628211) % (1 << 61)


def next_token(context: int) -> int:
    return (context >> 17) % VOCABULARY


def expected(request: Request, limit: int) -> list[int]:
    """The answer of a request that runs alone on a fresh machine."""
    context = EMPTY
    for position, token in enumerate(request.prompt):
        context = digest(context, token, position)
    answer: list[int] = []
    while len(answer) < min(limit, request.max_tokens):
        token = next_token(context)
        answer.append(token)
        if token in request.stop_tokens:
            break
        context = digest(context, token, len(request.prompt) + len(answer) - 1)
    return answer


def facts(**changes: object) -> EngineFacts:
    """Small pages and chunks, so that a few dozen tokens meet every edge."""
    plain: dict[str, object] = dict(
        num_pages=64, page_tokens=4, context=200, page_bytes=1000, prompt_grid=4, chunk=8, max_rows=8, num_stages=1,
    )
    return EngineFacts(**{**plain, **changes})  # type: ignore[arg-type]


class FakeEngine:
    """Cells by (page, place); images by handle. ``snapshot_every``: positions where a recurrent model's state is kept.

    ``drafter`` is asked where drafts are wanted. ``costs``: seconds of a window without drafting, and of drafting, by its rows and the
    largest number of drafts that came.
    """

    def __init__(self, facts: EngineFacts, snapshot_every: int = 0, eager: bool = False, drafter: Drafter | None = None) -> None:
        self.facts = facts
        self.eager = eager
        self.snapshot_every = snapshot_every
        self.drafter = drafter
        self.costs: Callable[[int, int], tuple[float, float]] | None = None
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}
        self.images: dict[int, list[tuple[dict[int, tuple[int, int]], set[int]]]] = {}
        self.windows: deque[Window] = deque()
        self.copies: deque[PageCopy] = deque()
        self.early: dict[tuple[str, int], WindowDone | CopyDone] = {}
        self.live: dict[int, tuple[str, int, int]] = {}
        self.states: set[tuple[int, int]] = set()
        self.broken: set[tuple[int, str]] = set()
        self.is_trusting = False
        self.rows = 0
        self.prompt_tokens = 0

    @property
    def is_idle(self) -> bool:
        return not self.windows and not self.copies

    def take(self, command: Window | PageCopy) -> None:
        if isinstance(command, Window):
            self.windows.append(command)
        elif command.direction != "drop":
            self.copies.append(command)
        else:
            del self.images[command.host]
            return
        if self.eager:
            self.early[type(command).__name__, command.id] = self._do(command)

    def land(self, seconds: float = 0.0) -> WindowDone | CopyDone:
        """Report the oldest window, or the oldest copy where no window flies."""
        return self.land_window(seconds) if self.windows else self.land_copy()

    def land_window(self, seconds: float = 0.0) -> WindowDone:
        window = self.windows.popleft()
        done = self.early.pop(("Window", window.id), None) or self._do(window)
        assert isinstance(done, WindowDone)
        if self.costs is None:
            return WindowDone(window.id, done.results, seconds)
        drafts = max(len(result.drafts) for result in done.results)
        own, drafting = self.costs(sum(len(segment.tokens) for segment in window.segments), drafts)
        stages = (*(own for _ in range(self.facts.num_stages - 1)), own + drafting)
        return WindowDone(window.id, done.results, sum(stages), stages, drafting)

    def land_copy(self) -> CopyDone:
        copy = self.copies.popleft()
        return self.early.pop(("PageCopy", copy.id), None) or self._do(copy)  # type: ignore[return-value]

    def lose_window(self) -> Window:
        """The oldest window fails."""
        window = self.windows.popleft()
        self.early.pop(("Window", window.id), None)
        for segment in window.segments:
            self.lose_row(segment.request_id)
        return window

    def lose_row(self, request_id: str) -> None:
        """What this request still has in flight works on garbage."""
        self.broken |= {(window.id, request_id) for window in self.windows}

    def _do(self, command: Window | PageCopy) -> WindowDone | CopyDone:
        if isinstance(command, PageCopy):
            return self._copy(command)
        assert len({segment.slot for segment in command.segments}) == len(command.segments)
        if command.kind == "prompt":
            self.prompt_tokens += len(command.segments[0].tokens)
        results = [
            SegmentResult(picks=() if segment.sampling is None else (0,)) if (command.id, segment.request_id) in self.broken
            else self._run(segment) for segment in command.segments
        ]
        return WindowDone(command.id, tuple(results))

    def _copy(self, copy: PageCopy) -> CopyDone:
        size = self.facts.page_tokens
        if copy.direction == "out":
            # A state that lives in the seat does not travel with the pages.
            self.live = {slot: live for slot, live in self.live.items() if live[2] not in copy.pages}
            self.images[copy.host] = [
                (
                    {place: self.cells[page, place] for place in range(size) if (page, place) in self.cells},
                    {point for owner, point in self.states if owner == page},
                ) for page in copy.pages
            ]
        else:
            for page, (cells, points) in zip(copy.pages, self.images[copy.host], strict=False):
                self._wipe(page)
                self.cells.update({(page, place): value for place, value in cells.items()})
                self.states |= {(page, point) for point in points}
        return CopyDone(copy.id)

    def _wipe(self, page: int) -> None:
        for place in range(self.facts.page_tokens):
            self.cells.pop((page, place), None)
        self.states = {(owner, point) for owner, point in self.states if owner != page}

    def _run(self, segment: Segment) -> SegmentResult:
        self.rows += len(segment.tokens)
        if not segment.request_id:
            return SegmentResult(picks=(0,))
        size = self.facts.page_tokens
        self._check_resume(segment)
        context = self._read(segment)
        contexts = []
        for position, token in enumerate(segment.tokens, segment.start):
            context = digest(context, token, position)
            contexts.append(context)
            page = segment.pages[position // size]
            self.cells[page, position % size] = token, context
            self.states -= {(page, point) for point in range(position + 1, position + size + 1)}
        logprobs: tuple[TokenLogprob, ...] = ()
        if segment.prompt_logprobs >= 0:
            following = segment.tokens[1:] + (() if segment.next_token is None else (segment.next_token,))
            logprobs = tuple(TokenLogprob(token, -1.0) for token in following)
        picks = [] if segment.sampling is None else [next_token(one) for one in contexts[-1 - segment.num_drafts:]]
        drafts = segment.tokens[len(segment.tokens) - segment.num_drafts:]
        accepted = next((place for place, token in enumerate(drafts) if token != picks[place]), len(drafts))
        fed = len(contexts) - len(drafts) + accepted
        more = self._drafts(segment, contexts[fed - 1], segment.start + fed) if picks else ((), "")
        return SegmentResult(tuple(picks[:accepted + 1]), accepted, (), logprobs, "", self._snapshots(segment, segment.start + fed), *more)

    def _drafts(self, segment: Segment, context: int, position: int) -> tuple[Tokens, DraftSource]:
        """``position``: of the last pick."""
        limits = segment.draft_limits
        if limits.lookup:
            assert segment.history is not None, "a lookup needs the slot's text"
            prompt, generated = segment.history
            text = (*prompt, *generated)
            assert text[segment.start:] == segment.tokens[:len(segment.tokens) - segment.num_drafts], "the text as it is for this window"
        if self.drafter is None or not (limits.mtp or limits.lookup):
            return (), ""
        truth = []
        for place in range(position, position + 9):
            context = digest(context, next_token(context), place)
            truth.append(next_token(context))
        return self.drafter(segment, truth)

    def _read(self, segment: Segment) -> int:
        """The context before the segment, from every cell the page table leads to; each must follow from the one before."""
        size, context = self.facts.page_tokens, EMPTY
        if self.is_trusting and segment.start:
            last = segment.start - 1
            return self.cells[segment.pages[last // size], last % size][1]
        for position in range(segment.start):
            token, stored = self.cells[segment.pages[position // size], position % size]
            context = digest(context, token, position)
            assert context == stored, f"{segment.request_id}: position {position} holds something else"
        return context

    # ---- a state that cannot be cut anywhere

    def _check_resume(self, segment: Segment) -> None:
        if not self.facts.snapshots or segment.start == 0:
            return
        page = segment.pages[(segment.start - 1) // self.facts.page_tokens]
        is_live = self.live.get(segment.slot) == (segment.request_id, segment.start, page)
        assert is_live or (page, segment.start) in self.states, f"no state at {segment.start}"

    def _snapshots(self, segment: Segment, end: int) -> tuple[int, ...]:
        """``end``: the position after the last token that was right."""
        if not self.facts.snapshots:
            return ()
        self.live[segment.slot] = segment.request_id, end, segment.pages[(end - 1) // self.facts.page_tokens]
        every = self.snapshot_every
        points = [point for point in range(segment.start + 1, end + 1) if point % every == 0]
        if segment.sampling is not None and len(segment.tokens) - segment.num_drafts > 1:
            points.append(end)  # a turn boundary: the end of the prompt
        points = sorted(set(points))
        self.states |= {(segment.pages[(point - 1) // self.facts.page_tokens], point) for point in points}
        return tuple(points)
