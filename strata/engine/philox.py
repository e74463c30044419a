"""The random numbers of sampling: Philox 4x32-10, a function of a key and a counter and of nothing else.

Theory: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A counter of four 32-bit words goes
through ten rounds of two 32 x 32 -> 64 bit products and xors with a key of two words that grows by a constant each round. There is
no state, so the noise of one token at one position of one request needs no other token, row or window: that is why batching,
drafts and preemption cannot change a seeded answer. The constants are the published ones; Random123's vectors test them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)

# Noise is -log(-log(u)) with u on the grid (word + 0.5) * 2**-32, so it is bounded; sampling prunes with these bounds.
NOISE_MAX = float(-np.log(-np.log((2.0**32 - 0.5) * 2.0**-32)))
NOISE_MIN = float(-np.log(-np.log(0.5 * 2.0**-32)))


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """The four output words of each counter. All arrays are uint64 with values below 2**32 and broadcast against each other."""
    c0, c1, c2, c3 = counter
    for k0, k1 in zip(key_schedule(key[0], KEY_STEPS[0]), key_schedule(key[1], KEY_STEPS[1])):
        p0 = c0 * MULTIPLIERS[0]
        p1 = c2 * MULTIPLIERS[1]
        # The low halves (words 1 and 3) keep the product's high bits until the next round's mask: two operations saved.
        c0 = mix(p1 >> HALF, c1, k0)
        c2 = mix(p0 >> HALF, c3, k1)
        c1, c3 = p1, p0
    return c0, c1 & LOW, c2, c3 & LOW


def key_schedule(key: Words, step: np.uint64) -> Words:
    """The key word of each round, [rounds, n]."""
    return (key + step * np.arange(ROUNDS, dtype=np.uint64)[:, None]) & LOW


def mix(high: Words, word: Words, key: Words) -> Words:
    """(high ^ word ^ key) modulo 2**32, in the memory of ``high`` where it is large enough."""
    if high.size < word.size or high.size < key.size:
        return (high ^ word ^ key) & LOW
    high ^= word
    high ^= key
    high &= LOW
    return high


def gumbel(positions: NDArray[Any], tokens: NDArray[Any], seeds: NDArray[Any], choices: NDArray[Any]) -> NDArray[np.float64]:
    """Gumbel noise, float64, one for each of ``tokens`` [n]; the other arrays are [n] or [1], every value below 2**63.

    Key (seed's low 32 bits, choice), counter (absolute position of the token drawn, token id, seed's high 32 bits, 0); the noise is
    -log(-log(u)), u = (first word + 0.5) / 2**32.
    """
    seeds = seeds.astype(np.uint64)
    counter = (positions.astype(np.uint64), tokens.astype(np.uint64), seeds >> HALF, np.zeros(1, np.uint64))
    first = philox(counter, (seeds & LOW, choices.astype(np.uint64)))[0].astype(np.float64)
    first += 0.5
    first *= 2.0**-32
    return -np.log(-np.log(first))
