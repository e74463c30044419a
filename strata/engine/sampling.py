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
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.engine import filters, philox
from strata.messages import TokenLogprob, Tokens
from strata.request import Sampling

GREEDY_BELOW = 1e-5  # a temperature that cannot turn a choice but could overflow the division; vLLM draws the line there too
BROKEN = -1  # the pick of a row without a usable maximum
JOINED = 2048  # candidates up to which rows share one call of Philox
BLOCK = 24_576  # candidates of one call otherwise: its arrays stay in the cache, and threads seldom meet at the GIL

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
    """Tokens ``ids``, ascending, of the row ``index``, whose logits are ``values`` [vocab]."""

    index: int
    row: Row
    values: filters.Logits
    ids: filters.Ids

    @property
    def scores(self) -> NDArray[np.float64]:
        return self.values[self.ids].astype(np.float64) / self.row.sampling.temperature


def pick(logits: Sequence[filters.Logits] | NDArray[np.float32], rows: Sequence[Row], spread: Spread = map) -> list[int]:
    """One token, or ``BROKEN``, for each row of ``logits``: float32 [rows, vocab] or a list of such rows."""
    picks = [BROKEN] * len(rows)
    likeliest = []
    for index, row in enumerate(rows):
        values = logits[index]
        sampling = row.sampling
        if sampling.logit_bias or sampling.has_penalties:
            values = filters.adjusted(values, sampling, row.prompt, row.generated)
        best = values.argmax()  # the first NaN where there is one
        if not np.isfinite(values[best]):
            continue
        picks[index] = int(best)
        if sampling.temperature >= GREEDY_BELOW:
            likeliest.append(Candidates(index, row, values, np.array([best])))
    for index, token in draw(likeliest, spread).items():
        picks[index] = token
    return picks


def draw(likeliest: Sequence[Candidates], spread: Spread) -> dict[int, int]:
    """The token drawn for each row, given its likeliest token (finite). Two rounds of noise serve all rows: each has a fixed cost."""
    found, whole = [], []
    for one in likeliest:
        ids = filters.survivors(one.values, one.row.sampling)
        if ids is None:
            whole.append(one)
        else:
            found.append(replace(one, ids=ids))
    for one, (total, _) in zip(whole, best_of(whole)):
        found.append(replace(one, ids=reachable(one.values, total, one.row.sampling.temperature)))
    best: dict[int, tuple[float, int]] = {}
    work = pieces(found)
    for piece, winners in zip(work, spread(best_of, work)):
        for one, winner in zip(piece, winners):
            # A row's pieces come in the order of its ids, so that of equal totals the lowest id stays.
            if one.index not in best or winner[0] > best[one.index][0]:
                best[one.index] = winner
    return {index: token for index, (_, token) in best.items()}


def reachable(values: filters.Logits, total: float, temperature: float) -> filters.Ids:
    """Tokens whose logit / temperature + largest noise may reach ``total``; the slack covers rounding and costs nothing."""
    least = temperature * (total - philox.NOISE_MAX - 1e-9 * (1.0 + abs(total)))
    return np.flatnonzero(values >= np.nextafter(np.float32(least), np.float32(-np.inf)))


def pieces(found: Sequence[Candidates]) -> list[list[Candidates]]:
    """Work of useful size: rows with few candidates together, because a call has a fixed cost; long rows in blocks."""
    few = [one for one in found if len(one.ids) <= JOINED]
    result = [few] if few else []
    for one in found:
        if len(one.ids) > JOINED:
            result += [[replace(one, ids=one.ids[start:start + BLOCK])] for start in range(0, len(one.ids), BLOCK)]
    return result


def best_of(piece: Sequence[Candidates]) -> list[tuple[float, int]]:
    """The best total, score + noise, and its token for each of some rows; of equal totals the lowest id."""
    if not piece:
        return []
    keys = np.array([(one.row.position, one.row.sampling.seed, one.row.sampling.choice) for one in piece], np.uint64)
    sizes = [len(one.ids) for one in piece]
    if len(piece) > 1:
        keys = np.repeat(keys, sizes, axis=0)
    totals = philox.gumbel(keys[:, 0], np.concatenate([one.ids for one in piece]), keys[:, 1], keys[:, 2])
    totals += np.concatenate([one.scores for one in piece])
    best = [int(total.argmax()) for total in np.split(totals, np.cumsum(sizes)[:-1])]
    starts = np.cumsum([0] + sizes).tolist()
    return [(float(totals[start + at]), int(one.ids[at])) for one, start, at in zip(piece, starts, best)]


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
