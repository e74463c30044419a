"""How sure a head has to be: what it says is worth what came of it."""

from __future__ import annotations

import pytest

from strata.engine.draft_trust import GO_ON, LEAST_CHANCE, MOST, PRIOR, RETRY, SORTS, Trust
from strata.messages import Segment, SegmentResult, Tokens


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


def test_a_whole_chain_is_cut_where_it_is_no_longer_worth_it() -> None:
    """Guesses at one half: four of them are right together less often than a tenth of the time."""
    trust = taught(0.5, 599, 1201)
    sort = trust.sort(0.5, False)
    assert trust.worth([sort] * 9) == 3 and trust.worth([sort] * 2) == 2 and trust.worth([]) == 0


def test_the_head_goes_on_behind_what_is_rather_sure() -> None:
    assert Trust().goes_on(GO_ON) and not Trust().goes_on(GO_ON - 0.01)
    assert Trust(0).goes_on(0.0), "every draft is made"


def segment(drafts: Tokens, slot: int = 0, name: str = "r") -> Segment:
    return Segment(name, slot, 0, (1, *drafts), (0,), num_drafts=len(drafts))


@pytest.mark.parametrize("window, accepted, error, tried, right", [
    (segment((7, 8, 9)), 3, "", [1, 1, 1], [1, 1, 1]),
    (segment((7, 8, 9)), 1, "", [1, 1, 0], [1, 0, 0]),  # the third was not reached
    (segment((7, 8)), 2, "", [1, 1, 0], [1, 1, 0]),  # there was no row for the third
    (segment((7, 8, 9)), 0, "NaN", [0, 0, 0], [0, 0, 0]),
    (segment((7, 5)), 1, "", [0, 0, 0], [0, 0, 0]),
    (segment((7, 8, 9), name="s"), 3, "", [0, 0, 0], [0, 0, 0]),
    (segment((7, 8, 9), slot=1), 3, "", [0, 0, 0], [0, 0, 0]),
    (segment(()), 0, "", [0, 0, 0], [0, 0, 0]),
])  # fmt: skip
def test_what_was_checked_is_learnt_once(window: Segment, accepted: int, error: str, tried: list[int], right: list[int]) -> None:
    trust = Trust()
    trust.proposed(segment(()), (7, 8, 9), (3, 4, 5))
    for _ in range(2):
        trust.checked(window, SegmentResult((0,) * (accepted + 1), accepted, error=error))
    assert (trust._tried[3:6], trust._right[3:6]) == (tried, right)
