"""The choice of drafts as a pure function: against every other choice, the formula, and what chances it starts from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.messages import DraftLimits
from strata.slots.curve import Curve, straight
from strata.slots.drafting import (
    FIRST_GUESS, FLAT, GAIN, UNLIKE, WEIGHT, Chance, Cost, Prospect, Tally, choose, server_chances, share_rows, slot_chances, window_cost,
)
from strata.slots.grouping import turn

unit = st.floats(0.0, 1.0)


@st.composite
def chances(draw: st.DrawFn, most: int) -> list[Chance]:
    """Falling with depth, as they must."""
    depth = draw(st.integers(0, most))
    shares, rights = (sorted((draw(unit) for _ in range(depth)), reverse=True) for _ in range(2))
    return [Chance(*both) for both in zip(shares, rights)]


prospects = st.lists(st.builds(Prospect, chances(3), chances(2)), min_size=1, max_size=3)
stages = st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.0, 1.0)), min_size=1, max_size=3)
step_costs = st.lists(st.floats(0.0, 0.5), min_size=3, max_size=3).map(lambda costs: [0.0, *itertools.accumulate(costs)])


def promised(slots: Sequence[Prospect], cost: Cost, limits: Sequence[DraftLimits], paid: float = 1.0) -> float:
    """Tokens per second, as the head of drafting.py has it, written down anew; ``paid``: the share of what drafts cost."""
    rows = tokens = float(len(slots))
    silent = 1.0
    for slot, limit in zip(slots, limits):
        finds = slot.lookup[0].share if slot.lookup else 0.0
        silent *= finds
        for chance in slot.lookup[:limit.lookup]:
            rows, tokens = rows + chance.share, tokens + chance.share * chance.right
        for chance in slot.mtp[:limit.mtp]:
            share = chance.share * (1 - finds)
            rows, tokens = rows + share, tokens + share * chance.right
    head = (1 - silent) * cost.steps[max(limit.mtp for limit in limits)]
    alone = cost.at(len(slots), 0.0)
    return tokens / (alone + paid * (cost.at(rows, head) - alone))


@settings(max_examples=150, deadline=None)
@given(prospects, stages, st.integers(1, 3), st.floats(0.0, 1.0), step_costs)
def test_no_other_choice_promises_much_more(
    slots: list[Prospect], costs: list[tuple[float, float]], windows: int, between: float, steps: list[float],
) -> None:
    """Where the time is one line, none does; where it is the longer of two, one that just fills the room below the bend may, a little."""
    cost = window_cost([straight(*each) for each in costs], windows, between, steps)
    near = 1e-6 if windows == 1 else 0.05
    chosen, none = choose(slots, cost), [DraftLimits()] * len(slots)
    ways = list(itertools.product(*(
        [DraftLimits(*both) for both in itertools.product(range(len(slot.mtp) + 1), range(len(slot.lookup) + 1))] for slot in slots
    )))
    fastest, worth = (max(promised(slots, cost, way, paid) for way in ways) for paid in (1.0, FLAT))
    needed = promised(slots, cost, none) * (1 + GAIN * min(len(slots), UNLIKE))
    speed = promised(slots, cost, chosen)
    if chosen == none:
        assert fastest < needed * (1 + near)
    else:
        assert speed >= needed * (1 - 1e-9)
        assert promised(slots, cost, chosen, FLAT) >= worth * (1 - near) or speed >= fastest * (1 - near)


@settings(max_examples=60)
@given(stages, st.integers(1, 4), st.floats(0.0, 1.0), st.integers(1, 32), st.floats(0.0, 1.0))
def test_a_windows_time_is_that_of_grouping(costs: list[tuple[float, float]], windows: int, between: float, rows: int, head: float) -> None:
    window = [fixed + per_row * rows for fixed, per_row in costs]
    window[-1] += head
    cost = window_cost([straight(*each) for each in costs], windows, between, [0.0])
    assert cost.at(rows, head) == pytest.approx(turn([window] * windows, between))


PLAIN = Cost(((straight(0.9, 0.1), 1.0),), (0.0, 0.065, 0.13, 0.195))


def certain(*rights: float) -> list[Chance]:
    return [Chance(1.0, right) for right in rights]


def test_the_better_slot_gets_the_row() -> None:
    """Eight slots: a row must bring more than a slot's share of the window, so only who is nearly always right drafts."""
    slots = [Prospect(certain(0.3, 0.1, 0.03)) for _ in range(7)] + [Prospect((), certain(0.95, 0.9, 0.86))]
    assert choose(slots, PLAIN) == [DraftLimits()] * 7 + [DraftLimits(0, 3)]


def test_alone_everything_that_beats_a_row_is_worth_it() -> None:
    assert choose([Prospect(certain(0.8, 0.64, 0.512))], PLAIN) == [DraftLimits(3, 0)]
    assert choose([Prospect(certain(0.1, 0.01, 0.001))], PLAIN) == [DraftLimits()]


ROWS = Cost(((straight(0.9, 0.1), 1.0),), (0.0,))


def test_few_drafts_more_are_no_loss_but_drafts_at_all_must_pay() -> None:
    """A row costs a tenth of a window: a first draft must bring more than that by GAIN, a second one may bring less."""
    assert choose([Prospect((), certain(0.112))], ROWS) == [DraftLimits()]
    assert choose([Prospect((), certain(0.12))], ROWS) == [DraftLimits(0, 1)]
    assert choose([Prospect((), certain(0.8, 0.12))], ROWS) == [DraftLimits(0, 2)]
    assert choose([Prospect((), certain(0.8, 0.08))], ROWS) == [DraftLimits(0, 1)]


def test_many_slots_must_promise_more() -> None:
    """A row is a seventeenth of a window of eight: 0.6 of a token a row promise 4 %, 0.95 a tenth, 0.99 an eighth."""
    assert choose([Prospect((), certain(0.6))] * 2, ROWS) == [DraftLimits(0, 1)] * 2
    assert choose([Prospect((), certain(0.6))] * 8, ROWS) == [DraftLimits()] * 8
    cheap = Cost(((straight(0.9, 0.05), 1.0),), (0.0,))
    assert choose([Prospect((), certain(0.4))] * 8, cheap) == [DraftLimits()] * 8
    assert choose([Prospect((), certain(0.6))] * 8, cheap) == [DraftLimits(0, 1)] * 8


def test_a_row_that_costs_nothing_may_follow_a_dear_one() -> None:
    """Rows go in pairs: a second draft alone is no gain, with a third it is."""
    pairs = Cost(((Curve((1.0, 1.0, 1.0, 1.2, 1.2, 1.4)), 1.0),), (0.0,))
    assert choose([Prospect((), certain(0.5, 0.12))], pairs) == [DraftLimits(0, 1)]
    assert choose([Prospect((), certain(0.5, 0.12, 0.1))], pairs) == [DraftLimits(0, 3)]


def test_a_step_that_only_one_of_many_slots_wants_is_not_taken() -> None:
    """The head's time is paid once for all, so it must be worth it for all."""
    dear = Cost(((straight(0.9, 0.001), 1.0),), (0.0, 0.3, 0.6, 0.9))
    assert choose([Prospect(certain(0.9)), *[Prospect()] * 7], dear) == [DraftLimits()] * 8
    assert choose([Prospect(certain(0.9))] * 8, dear) == [DraftLimits(1, 0)] * 8


# ---------------------------------------------------------------- what the chances start from


windows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=30)


@given(windows)
def test_a_tally_counts_every_depth(seen: list[tuple[int, int, int, int]]) -> None:
    """asked >= given >= checked >= accepted."""
    tally = Tally(3)
    outcomes = [tuple(sorted(one, reverse=True)) for one in seen]
    for asked, given_, checked, accepted in outcomes:
        tally.add(asked, given_, checked, accepted)
    for depth, found in enumerate(tally.by_depth(), 1):
        assert found == pytest.approx((
            sum(asked >= depth for asked, _, _, _ in outcomes),
            sum(came >= depth for _, came, _, _ in outcomes),
            sum(checked >= depth for _, _, checked, _ in outcomes),
            sum(accepted >= depth for _, _, _, accepted in outcomes),
        ))


def test_a_depth_that_was_never_tried_is_like_the_one_before() -> None:
    tally = Tally(3)
    for _ in range(1000):
        tally.add(1, 1, 1, 1)
    one, two, three = server_chances(tally, FIRST_GUESS["mtp"])
    assert one.right > 0.99 and (two.right, three.right) == pytest.approx((one.right ** 2, one.right ** 3))
    for _ in range(1000):
        tally.add(1, 0, 0, 0)
    tally.add(3, 3, 3, 3)
    shares = [chance.share for chance in server_chances(tally, FIRST_GUESS["mtp"])]
    assert shares == sorted(shares, reverse=True) and 0.4 < shares[0] < 0.6


def test_depths_that_nobody_reaches_are_not_offered() -> None:
    server = server_chances(Tally(15), (1.0, 0.5))
    assert [chance.right for chance in server[:3]] == [0.5, 0.25, 0.125]
    assert len(slot_chances(Tally(15), server, 15)) == 5  # 0.5 ** 6 is below 0.03
    assert len(slot_chances(Tally(15), [Chance(0.0, 0.0)] * 15, 15)) == 1


def test_what_is_given_where_it_is_sure_is_worth_more_than_a_product() -> None:
    """Half of the windows have one draft, which is wrong, the others three, all right."""
    tally = Tally(3)
    for _ in range(1000):
        tally.add(3, 1, 1, 0)
        tally.add(3, 3, 3, 3)
    for found in (server_chances(tally, FIRST_GUESS["mtp"]), slot_chances(tally, [Chance(1.0, 0.5)] * 3, 3)):
        assert [chance.share for chance in found] == pytest.approx([1, 0.5, 0.5], abs=0.02)
        assert [chance.right for chance in found] == pytest.approx([0.5, 1, 1], abs=0.02)


def test_a_slot_starts_as_the_server_and_goes_its_own_way() -> None:
    server = [Chance(1.0, 0.5), Chance(1.0, 0.25)]
    own = Tally(2)
    assert slot_chances(own, server, 2) == [Chance(1.0, 0.5), Chance(1.0, 0.25)]
    for _ in range(int(WEIGHT)):
        own.add(2, 2, 2, 2)
    assert slot_chances(own, server, 2) == [Chance(1.0, 0.75), Chance(1.0, 0.625)]
    own.fade(0.0)
    assert slot_chances(own, server, 1) == [Chance(1.0, 0.5)]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12), st.integers(0, 40), st.integers(0, 50))
def test_rows_that_are_short_are_shared_out(wanted: list[int], rows: int, first: int) -> None:
    shares = share_rows(wanted, rows, first % len(wanted))
    assert all(0 <= share <= one for share, one in zip(shares, wanted))
    assert sum(shares) == min(rows, sum(wanted)), "all of them are used"
    assert share_rows(wanted[first % len(wanted):] + wanted[:first % len(wanted)], rows, 0) == [
        shares[(first + place) % len(wanted)] for place in range(len(wanted))
    ], "what cannot be shared evenly goes round from the first"
    cut = [share for share, one in zip(shares, wanted) if share < one]
    assert not cut or max(shares) <= min(cut) + 1, "nobody gets two more than somebody who wanted them too"
