"""The end of a window: from the last stage's logits to one ``SegmentResult`` per segment.

Rules. Each segment's result depends on its own rows alone. A row that is not finite gives its segment an ``error`` (only where that
row is reached: behind a rejected draft nobody reads it). Logprobs come from raw logits, before bias, penalties and filters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from strata.engine import sampling
from strata.engine.filters import Ids, Logits
from strata.engine.rows import wanted_rows
from strata.engine.sampling import Row, Spread
from strata.messages import Segment, SegmentResult, TokenLogprob, Tokens, Window

NOT_FINITE = "the model gave logits that are not finite numbers; the request cannot go on"
PROMPTS_KEPT = 64


class Sampler:
    """Turns logits into results, ``spread`` over threads where there is much noise to compute.

    Its only state is a memo: the distinct tokens of prompts whose requests carry a penalty.
    """

    def __init__(self, spread: Spread = map) -> None:
        self._spread = spread
        self._distinct = DistinctTokens()

    def __call__(self, window: Window, logits: NDArray[np.float32]) -> tuple[SegmentResult, ...]:
        """``logits`` float32 [wanted rows, vocab], in the order of ``wanted_rows(window)``; results in the window's order."""
        place = {int(row): index for index, row in enumerate(wanted_rows(window))}
        spans = list(segment_rows(window))
        asked = [(index, row) for index, (segment, first) in enumerate(spans) for row in picked_rows(segment)]
        rows = [self._row(spans[index][0], row) for index, row in asked]
        chosen = sampling.pick([logits[place[spans[index][1] + row]] for index, row in asked], rows, self._spread)
        picks: list[list[int]] = [[] for _ in spans]
        for (index, _), token in zip(asked, chosen):
            picks[index].append(token)
        return tuple(
            result(segment, picks[index], [logits[place[first + row]] for row in reported_rows(segment)])
            for index, (segment, first) in enumerate(spans)
        )

    def _row(self, segment: Segment, row: int) -> Row:
        """Row ``row`` of a segment; its history includes the drafts before it, which are right if the row is reached."""
        assert segment.sampling is not None
        position = segment.start + row + 1
        if segment.history is None or not segment.sampling.has_penalties:
            return Row(segment.sampling, position)
        prompt, generated = segment.history
        first = len(segment.tokens) - segment.num_drafts
        return Row(segment.sampling, position, self._distinct(prompt), [*generated, *segment.tokens[first:row + 1]])


class DistinctTokens:
    """The distinct tokens of a prompt, ascending; those of the last prompts are remembered.

    Sorting a long prompt for every token would cost more than the draw. The memo holds the prompt, so its id() stays its own.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[Tokens, Ids]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def __call__(self, prompt: Tokens) -> Ids:
        known = self._known.get(id(prompt))
        if known is None:
            known = (prompt, np.unique(np.array(prompt, np.int64)))
            self._known[id(prompt)] = known
            if len(self._known) > PROMPTS_KEPT:
                self._known.popitem(last=False)
        return known[1]


def segment_rows(window: Window) -> Iterator[tuple[Segment, int]]:
    """Each segment with the window's row that its first token has."""
    first = 0
    for segment in window.segments:
        yield segment, first
        first += len(segment.tokens)


def picked_rows(segment: Segment) -> range:
    """Rows of a segment that need a pick: the last one, and each row before a draft."""
    count = 0 if segment.sampling is None else segment.num_drafts + 1
    return range(len(segment.tokens) - count, len(segment.tokens))


def reported_rows(segment: Segment) -> range:
    """Rows of a segment whose logits are needed beyond the pick: all for prompt logprobs, the picked ones for logprobs."""
    if segment.prompt_logprobs >= 0:
        return range(len(segment.tokens))
    return picked_rows(segment) if segment.sampling is not None and segment.sampling.logprobs >= 0 else range(0)


def result(segment: Segment, picks: list[int], logits: Sequence[Logits]) -> SegmentResult:
    """``picks`` of the segment's ``picked_rows``; ``logits`` of its ``reported_rows``."""
    prompt = prompt_logprobs(segment, logits)
    if prompt is None:
        return SegmentResult(error=NOT_FINITE)
    if segment.sampling is None:
        return SegmentResult(prompt_logprobs=prompt)
    accepted = sampling.accepted(segment.tokens[len(segment.tokens) - segment.num_drafts:], picks)
    kept = tuple(picks[: accepted + 1])
    if sampling.BROKEN in kept:
        return SegmentResult(error=NOT_FINITE)
    count = segment.sampling.logprobs
    rows = logits[len(logits) - len(picks):] if count >= 0 else ()
    logprobs = tuple(sampling.token_logprob(row, token, count) for row, token in zip(rows, kept))
    return SegmentResult(kept, accepted, logprobs, prompt)


def prompt_logprobs(segment: Segment, logits: Sequence[Logits]) -> tuple[TokenLogprob, ...] | None:
    """The logprob of the prompt token after each row, None if a row is not finite; () where none was asked for."""
    if segment.prompt_logprobs < 0:
        return ()
    following = segment.tokens[1:] + (() if segment.next_token is None else (segment.next_token,))
    if not all(np.isfinite(row.max()) for row in logits):
        return None
    return tuple(sampling.token_logprob(row, token, segment.prompt_logprobs) for row, token in zip(logits, following))
