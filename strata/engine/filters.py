"""Which tokens may be drawn: logit bias, penalties, top_k, top_p, min_p, in this order.

Rules. Penalties are vLLM's: repetition divides a positive logit and multiplies a negative one of every token seen in the prompt or
the answer; then frequency x count and presence are subtracted for tokens of the answer. top_p and min_p look at the softmax of the
logits that are left, *before* the temperature divides them, so a hotter draw chooses among the same tokens. Equal logits are
ordered by token id, the lowest first, so that every cut is one set. All arithmetic on logits is float32; masses are sums in float64.

Why no full sort: a vocabulary has 49,000 to 250,000 tokens and a nucleus some tens. A cut is made by a threshold, and only what
lies above it is sorted; the result is the same set (the tests compare with a sorting twin).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.request import Sampling

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]

NUCLEUS_DEPTHS = (2.0, 6.0, 12.0)  # logits below the best one, tried in turn before everything is sorted


def adjusted(logits: Logits, sampling: Sampling, prompt: Ids, generated: Sequence[int]) -> Logits:
    """A copy of ``logits`` [vocab] after bias and penalties. ``prompt``: the distinct tokens of the prompt, ascending."""
    result = logits.copy()
    for token, bias in sampling.logit_bias:
        if 0 <= token < len(result):
            result[token] += np.float32(bias)
    if sampling.has_penalties:
        answer, counts = np.unique(np.array(generated, np.int64), return_counts=True)
        if sampling.repetition_penalty != 1.0:
            seen = np.union1d(prompt, answer)
            factor = np.float32(sampling.repetition_penalty)
            values = result[seen]
            result[seen] = np.where(values > 0, values / factor, values * factor)
        result[answer] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
        result[answer] -= np.float32(sampling.presence_penalty)
    return result


def survivors(logits: Logits, sampling: Sampling) -> Ids | None:
    """Ids, ascending, that top_k, top_p and min_p leave of a row with a finite maximum; None where all filters are off."""
    ids: Ids | None = None
    if 0 < sampling.top_k < len(logits):
        ids = top_k(logits, sampling.top_k)
    if sampling.top_p < 1.0:
        ids = top_p(logits, ids, sampling.top_p)
    if sampling.min_p > 0.0:
        ids = min_p(logits, ids, sampling.min_p)
    return ids


def top_k(logits: Logits, k: int) -> Ids:
    """The ``k`` largest, of equal ones the lowest ids."""
    last = np.partition(logits, len(logits) - k)[len(logits) - k]
    ids = np.flatnonzero(logits >= last)
    if len(ids) > k:
        ties = np.flatnonzero(logits[ids] == last)
        ids = np.delete(ids, ties[k - len(ids):])
    return ids


def top_p(logits: Logits, ids: Ids | None, p: float) -> Ids:
    """The fewest tokens, best first, whose mass within ``ids`` reaches ``p``; at least one."""
    left = logits if ids is None else logits[ids]
    below = left - left.max()
    weights = np.exp(below)
    wanted = p * float(weights.sum(dtype=np.float64))
    for depth in NUCLEUS_DEPTHS:
        near = np.flatnonzero(below >= -depth)
        if weights[near].sum(dtype=np.float64) > wanted * (1 + 1e-6):
            break
    else:
        near = np.arange(len(left))
    best = near[np.argsort(-left[near], kind="stable")]
    mass = np.cumsum(weights[best], dtype=np.float64)
    kept = np.sort(best[: int(np.searchsorted(mass, wanted)) + 1])
    return kept if ids is None else ids[kept]


def min_p(logits: Logits, ids: Ids | None, p: float) -> Ids:
    """Tokens at least ``p`` times as probable as the best: logit >= best + ln(p), a threshold without a softmax."""
    if ids is None:
        return np.flatnonzero(logits >= logits.max() + np.float32(np.log(p)))
    left = logits[ids]
    return ids[left >= left.max() + np.float32(np.log(p))]
