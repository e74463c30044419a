"""Philox against Random123's published vectors and a scalar twin, and the noise that sampling adds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine import philox

# Random123, examples/kat_vectors, "philox4x32 10": counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]

word = st.integers(0, 2**32 - 1)


def scalar_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The paper's rounds on Python integers, one at a time."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        high, low = divmod(0xD2511F53 * a, 2**32)
        high2, low2 = divmod(0xCD9E8D57 * c, 2**32)
        a, b, c, d = high2 ^ b ^ k, low2, high ^ d ^ m, low
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


def arrays(words: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], np.uint64) for value in words)


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert scalar_philox(counter, key) == expected
    assert tuple(int(part[0]) for part in philox.philox(arrays(counter), arrays(key))) == expected


@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_equals_the_scalar_twin(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    assert tuple(int(part[0]) for part in philox.philox(arrays(counter), arrays(key))) == scalar_philox(counter, key)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(0, 2**63 - 1), st.integers(0, 127), st.integers(1, 20_000))
def test_noise_follows_its_definition(position: int, seed: int, choice: int, size: int) -> None:
    tokens = np.arange(size)
    noise = philox.gumbel(np.array([position]), tokens, np.array([seed]), np.array([choice]))
    for token in {0, size // 2, size - 1}:
        first = scalar_philox((position, token, seed >> 32, 0), (seed & 0xFFFFFFFF, choice))[0]
        assert noise[token] == pytest.approx(-math.log(-math.log((first + 0.5) * 2.0**-32)), rel=1e-12, abs=1e-14)


def test_noise_of_many_rows_at_once_is_that_of_each_alone() -> None:
    """Bit for bit: the place of a token in an array must not matter."""
    rng = np.random.default_rng(0)
    n = 20_077
    positions, tokens = rng.integers(0, 2**31, n), rng.integers(0, 250_000, n)
    seeds, choices = rng.integers(0, 2**63 - 1, n), rng.integers(0, 5, n)
    joint = philox.gumbel(positions, tokens, seeds, choices)
    for i in rng.integers(0, n, 200):
        assert joint[i] == philox.gumbel(positions[i:i + 1], tokens[i:i + 1], seeds[i:i + 1], choices[i:i + 1])[0]


def test_bounds_are_those_of_the_grid() -> None:
    words = (np.array([0, 1, 2**32 - 2, 2**32 - 1], np.float64) + 0.5) * 2.0**-32
    noise = -np.log(-np.log(words))
    assert noise[0] == philox.NOISE_MIN and noise[-1] == philox.NOISE_MAX
    assert np.all(np.diff(noise) > 0) and np.isfinite(noise).all()


def test_noise_has_the_mean_and_variance_of_a_gumbel_variable() -> None:
    noise = philox.gumbel(np.array([7]), np.arange(200_000), np.array([1234]), np.array([0]))
    assert noise.mean() == pytest.approx(0.5772156649, abs=0.012)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.04)
