"""Which experts a row goes to, and how much of each: pure arithmetic on the router's outputs.

Scores are a softmax over all experts, or a sigmoid of each. Where the router has a bias (DeepSeek-V3's balancing without a loss), it
counts for the choice only: what the chosen experts weigh comes from the scores themselves. With expert groups, a group is worth its
two best experts, and only experts of the best groups can be chosen.

A row's choice and weights depend on that row alone. Equal scores go to the lower id; the experts of a row stand in the order of
their scores, which is also the order in which their outputs are added up. A row of NaN goes to the first experts and stays NaN.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata.engine.architecture import ExpertConfig

Floats = NDArray[np.float32]

# Weights of a row are not divided by less (llama.cpp: the least normal number of float16).
LEAST_SUM = np.float32(2.0**-14)


def route(logits: Floats, bias: Floats | None, config: ExpertConfig) -> tuple[NDArray[np.int64], Floats]:
    """The experts of each row, int64 [rows, used], best first, and their weights, float32 [rows, used].

    ``logits`` float32 [rows, count] is what the router gives; ``bias`` float32 [count] or None.
    """
    scores: Floats = _softmax(logits) if config.gate == "softmax" else np.reciprocal(1 + np.exp(-logits))
    keys = scores if bias is None else scores + bias
    if config.groups > 1:
        keys = _best_groups(keys, config)
    chosen = _best(keys, config.used)
    weights: Floats = np.take_along_axis(scores, chosen, axis=1)
    if config.normalised:
        weights /= np.maximum(_sums(weights), LEAST_SUM)
    if config.scale != 1.0:
        weights *= np.float32(config.scale)
    return chosen, weights


def _best(keys: Floats, count: int) -> NDArray[np.int64]:
    """The columns of the ``count`` largest of each row, the largest first."""
    return np.argsort(-keys, axis=1, kind="stable")[:, :count]


def _sums(values: Floats) -> Floats:
    """float32 [rows, 1]: of each row, by one dot product; NumPy's own sum may pair the columns otherwise for another number of rows."""
    return np.matmul(values[:, None, :], np.ones((values.shape[1], 1), np.float32))[:, 0]


def _softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / _sums(powers)


def _best_groups(keys: Floats, config: ExpertConfig) -> Floats:
    """``keys`` with minus infinity for the experts of all groups but the best."""
    grouped = keys.reshape(len(keys), config.groups, -1)
    two = min(2, grouped.shape[2])
    worth = np.take_along_axis(grouped, np.argsort(-grouped, axis=2, kind="stable")[..., :two], axis=2)
    best = _best(worth[..., 0] + worth[..., 1] if two == 2 else worth[..., 0], config.groups_used)
    kept = np.full_like(grouped, -np.inf)
    rows = np.arange(len(keys))[:, None]
    kept[rows, best] = grouped[rows, best]
    return kept.reshape(keys.shape)
