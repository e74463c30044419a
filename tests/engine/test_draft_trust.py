"""How sure a head has to be: what it says is worth what came of it."""

from __future__ import annotations

import pytest

from strata.engine.draft_trust import LEAST_CHANCE, MOST, PRIOR, RETRY, SORTS, Trust


def taught(probability: float, right: int, tried: int) -> Trust:
    trust, sort = Trust(), Trust.sort(probability, False)
    for number in range(tried):
        trust.learn(sort, number * right % tried < right)
    return trust


@pytest.mark.parametrize("probability", [1.0, 0.3, 1e-3, 0.0])
def test_an_unknown_head_is_tried(probability: float) -> None:
    trust = Trust()
    sort = trust.sort(probability, True)
    assert 0 <= sort < 2 * SORTS
    assert trust.chance(sort) == 1 and trust.is_worth(trust.chance(sort), sort)


def test_sorts_follow_the_probability_and_drawn_ones_are_others() -> None:
    sorts = [Trust.sort(0.9 / 2 ** (step / 2), False) for step in range(12)]
    assert sorts == sorted(set(sorts))
    assert not set(sorts) & {Trust.sort(0.9 / 2 ** (step / 2), True) for step in range(12)}


def test_what_is_never_right_is_soon_left_out_and_others_are_not() -> None:
    trust = Trust()
    bad, good = trust.sort(0.1, False), trust.sort(0.9, False)
    checked = 0
    while trust.is_worth(trust.chance(bad), bad):
        trust.learn(bad, False)
        trust.learn(good, True)
        checked += 1
    assert checked == pytest.approx(PRIOR / LEAST_CHANCE - PRIOR, abs=1)
    assert trust.is_worth(trust.chance(good), good)


def test_a_chain_is_as_likely_as_all_of_its_drafts() -> None:
    """Each of three guesses at one half pays; the fourth is reached too seldom."""
    trust = taught(0.5, 599, 1201)
    sort, chance, length = trust.sort(0.5, False), 1.0, 0
    while trust.is_worth(chance * trust.chance(sort), sort):
        chance *= trust.chance(sort)
        length += 1
    assert length == 3


def test_what_is_left_out_is_tried_again_at_times() -> None:
    trust = taught(0.1, 0, 100)
    sort = trust.sort(0.1, False)
    made = [trust.is_worth(trust.chance(sort), sort) for _ in range(3 * RETRY)]
    assert sum(made) == 3


def test_old_counts_fade() -> None:
    """After as many rights as wrongs ever counted, the wrongs have lost most of their weight."""
    trust = taught(0.4, 0, 5 * MOST)
    sort = trust.sort(0.4, False)
    assert trust.chance(sort) < 0.05
    for _ in range(MOST):
        trust.learn(sort, True)
    assert trust.chance(sort) > 0.6
