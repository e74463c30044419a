"""Rotary position embedding: the angle of each pair of dimensions at each position, with the usual ways to stretch it.

Theory: pair i of a head's first ``dims`` dimensions is a complex number that a token at position p turns by p * f_i,
f_i = base^(-2i/dims) (Su et al. 2021). Seen so, RoPE is one complex product, and every way of stretching a context
is another list of f_i and a magnitude: linear (f / factor), Llama 3 (a factor per frequency, stored by converters as
``rope_freqs.weight``), YaRN (Peng et al. 2023, section 3: f / factor for slow pairs, f for fast ones, a ramp in between,
and q, k scaled by 1 + 0.1 ln factor).

One pairing for all: models that pair halves (NEOX) get their q and k rows interleaved at load, which changes no dot product of
a query with a key. Angles are computed in float64, so that position 250,000 is as exact as position 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How a model turns its queries and keys.

    ``dims``: the first so many dimensions of a head turn. ``interleaved``: pairs as stored are (2i, 2i + 1), else (i, i + dims/2).
    ``scaling``: none, linear or yarn, by ``factor`` over ``original_context`` positions. YaRN only: ``magnitude`` of the turned
    vectors, None for 1 + 0.1 ln factor; ``beta_fast`` and ``beta_slow`` (turns over the original context) bound the ramp,
    ``extrapolation`` weighs it.
    """

    base: float
    dims: int
    interleaved: bool
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0
    magnitude: float | None = None
    extrapolation: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


class Rope:
    """The turning angles of one model. ``factors`` is the model's ``rope_freqs.weight`` (float32 [dims/2]), if it has one."""

    def __init__(self, config: RopeConfig, factors: NDArray[np.float32] | None = None) -> None:
        self.dims = config.dims
        pairs = np.arange(config.dims // 2)
        plain = config.base ** (-2.0 * pairs / config.dims)
        if factors is not None:
            plain = plain / factors
        self.frequencies, self.magnitude = plain, 1.0
        if config.scaling == "linear":
            self.frequencies = plain / config.factor
        elif config.scaling == "yarn":
            share = config.extrapolation * _extrapolated_share(config)
            self.frequencies = plain / config.factor * (1 - share) + plain * share
            self.magnitude = 1 + 0.1 * math.log(max(config.factor, 1.0)) if config.magnitude is None else config.magnitude

    def turns(self, positions: NDArray[np.int64]) -> NDArray[np.complex64]:
        """complex64 [rows, 1, dims/2]: what to multiply the pairs of each head by, at these positions ([rows])."""
        angles = positions[:, None, None] * self.frequencies
        turns = np.empty(angles.shape, np.complex64)
        turns.real = np.cos(angles)
        turns.imag = np.sin(angles)
        if self.magnitude != 1.0:
            turns *= np.float32(self.magnitude)
        return turns


def _extrapolated_share(config: RopeConfig) -> NDArray[np.float64]:
    """YaRN's ramp: 1 for pairs that turn more than beta_fast times over the original context, 0 for fewer than beta_slow."""

    def pair_of(turns: float) -> float:
        return config.dims * math.log(config.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.base))

    low = max(math.floor(pair_of(config.beta_fast)), 0)
    high = min(math.ceil(pair_of(config.beta_slow)), config.dims - 1)
    ramp = (np.arange(config.dims // 2) - low) / max(high - low, 0.001)
    return 1.0 - np.clip(ramp, 0.0, 1.0)


def interleave(rows: NDArray[np.float32], head_dim: int, config: RopeConfig) -> NDArray[np.float32]:
    """Reorder the rows (or items) of q or k so that the pairs (i, i + dims/2) become (2i, 2i + 1). Shape [heads * head_dim, ...]."""
    if config.interleaved:
        return rows
    half = config.dims // 2
    order = np.arange(head_dim)
    order[0 : config.dims : 2] = np.arange(half)
    order[1 : config.dims : 2] = np.arange(half, config.dims)
    return rows.reshape(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)
