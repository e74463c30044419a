"""From logits to tokens: the draw, the check of drafts, logprobs, and the results of a whole window.

Theory. A token is argmax of logit / temperature + Gumbel noise over the tokens that the filters leave: a draw from the softmax of
logit / temperature without a cumulative sum (the "Gumbel-max" rule). The noise of a token comes from philox.py and depends on seed,
choice, position and token id alone, so a row's token depends on nothing but its own logits and request. Drafts are accepted while
they equal the token that the target picks itself, which is why they never change an answer.

Exact pruning. The noise is bounded, so a token whose score cannot reach the total of the likeliest token, even with the largest
noise, is skipped before its noise is computed. The pick is that of the whole vocabulary's noise (tested); at temperature 0.7 some
thousand tokens are left of 49,152.

A row that holds NaN, +inf or nothing but -inf fails alone: its request ends with an error, its neighbours do not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.engine import filters, philox
from strata.messages import Sampling, TokenLogprob, Tokens

GREEDY_BELOW = 1e-5  # a temperature that cannot turn a choice but could overflow the division; vLLM draws the line there too
BROKEN = -1  # the pick of a row without a usable maximum
JOINED = 2048  # candidates up to which rows share one call of Philox
BLOCK = 8192  # candidates of one call otherwise: its arrays stay in the cache, and calls can run side by side

Scores = NDArray[np.float64]
Spread = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]  # map(), or the map of a pool of threads


@dataclass(frozen=True, slots=True)
class Row:
    """What the draw must know about one row. ``position``: absolute, of the token drawn. ``prompt``: distinct ids, ascending."""

    sampling: Sampling
    position: int
    prompt: filters.Ids = field(default_factory=lambda: np.empty(0, np.int64))
    generated: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may win a row: ids, ascending, and logit / temperature of each."""

    row: Row
    ids: filters.Ids
    scores: Scores

    @classmethod
    def of(cls, row: Row, values: filters.Logits, ids: filters.Ids) -> Candidates:
        return cls(row, ids, values[ids].astype(np.float64) / row.sampling.temperature)


def pick(logits: Sequence[filters.Logits] | NDArray[np.float32], rows: Sequence[Row], spread: Spread = map) -> list[int]:
    """One token, or ``BROKEN``, for each row of ``logits``: float32 [rows, vocab] or a list of such rows."""
    picks = [BROKEN] * len(rows)
    drawn: dict[int, filters.Logits] = {}
    for index, row in enumerate(rows):
        values = logits[index]
        sampling = row.sampling
        if sampling.logit_bias or sampling.has_penalties:
            values = filters.adjusted(values, sampling, row.prompt, row.generated)
        best = int(values.argmax())  # the first NaN where there is one
        if not np.isfinite(values[best]):
            continue
        picks[index] = best
        if sampling.temperature >= GREEDY_BELOW:
            drawn[index] = values
    for index, token in zip(drawn, draw([rows[index] for index in drawn], list(drawn.values()), spread)):
        picks[index] = token
    return picks


def draw(rows: Sequence[Row], values: Sequence[filters.Logits], spread: Spread) -> list[int]:
    """The draw of rows that have a finite maximum. Two calls of ``noises`` serve all rows, because each has a fixed cost."""
    left = [filters.survivors(one, row.sampling) for row, one in zip(rows, values)]
    whole = [index for index, ids in enumerate(left) if ids is None]
    likeliest = [Candidates.of(rows[index], values[index], np.array([values[index].argmax()])) for index in whole]
    for index, best, noise in zip(whole, likeliest, noises(likeliest, spread)):
        left[index] = reachable(values[index], float(best.scores[0] + noise[0]), rows[index].sampling.temperature)
    found = [Candidates.of(row, one, ids) for row, one, ids in zip(rows, values, left) if ids is not None]
    return [int(one.ids[(one.scores + noise).argmax()]) for one, noise in zip(found, noises(found, spread))]


def reachable(values: filters.Logits, total: float, temperature: float) -> filters.Ids:
    """Tokens whose logit / temperature + largest noise may reach ``total``; the slack covers rounding and costs nothing."""
    least = temperature * (total - philox.NOISE_MAX - 1e-9 * (1.0 + abs(total)))
    return np.flatnonzero(values >= np.nextafter(np.float32(least), np.float32(-np.inf)))


def noises(drawn: Sequence[Candidates], spread: Spread) -> list[Scores]:
    """The noise of every candidate, [len(ids)] each. Rows with few candidates share one call, which costs as much as one of them."""
    few = [number for number, one in enumerate(drawn) if len(one.ids) <= JOINED]
    many = [number for number, one in enumerate(drawn) if len(one.ids) > JOINED]
    pieces = [[drawn[number] for number in few]] if few else []
    for number in many:
        one = drawn[number]
        pieces += [[Candidates(one.row, one.ids[start:start + BLOCK], one.scores)] for start in range(0, len(one.ids), BLOCK)]
    flat = np.concatenate(list(spread(joint_noise, pieces))) if pieces else np.empty(0)
    order = few + many
    ends = np.cumsum([len(drawn[number].ids) for number in order])
    result: list[Scores] = [flat] * len(drawn)
    for number, part in zip(order, np.split(flat, ends[:-1]) if order else ()):
        result[number] = part
    return result


def joint_noise(piece: Sequence[Candidates]) -> Scores:
    """The noise of some rows' candidates, one row after the other."""
    keys = np.array([(one.row.position, one.row.sampling.seed, one.row.sampling.choice) for one in piece], np.uint64)
    if len(piece) > 1:
        keys = np.repeat(keys, [len(one.ids) for one in piece], axis=0)
    return philox.gumbel(keys[:, 0], np.concatenate([one.ids for one in piece]), keys[:, 1], keys[:, 2])


def accepted(drafts: Sequence[int], picks: Sequence[int]) -> int:
    """How many leading drafts equal the picks of the rows before them; ``picks`` has one more entry than ``drafts``."""
    for count, draft in enumerate(drafts):
        if draft != picks[count]:
            return count
    return len(drafts)


def token_logprob(logits: filters.Logits, token: int, count: int) -> TokenLogprob:
    """Natural log of the softmax of raw ``logits`` [vocab] at ``token``, and the ``count`` best tokens (float64 throughout).

    Equal logits are ordered by id. Values are never above 0, because the sum under the logarithm holds the best token's 1.
    """
    best = float(logits.max())
    total = float(np.log(np.exp(logits.astype(np.float64) - best).sum()))
    top: Tokens = ()
    if count > 0:
        ids = filters.top_k(logits, min(count, len(logits)))
        top = tuple(ids[np.argsort(-logits[ids], kind="stable")].tolist())
    return TokenLogprob(token, float(logits[token]) - best - total, tuple((t, float(logits[t]) - best - total) for t in top))
