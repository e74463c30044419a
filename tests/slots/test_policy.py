"""Slot choice against the rule stated a second time in other words, and the other choices against their examples."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from strata.errors import SettingError
from strata.slots.policy import (
    MIN_GROUP_MATCH, Reader, Seat, SlotPolicy, choose_groups, chunk_end, containment_match, eviction_key, pick_reader, pick_slot,
    retry_after, scan_order,
)

SHAPES = [(6, 3), (8, 4), (8, 2), (4, 2)]


def random_seats(source: random.Random, slots: int) -> list[Seat]:
    seats = []
    for _ in range(slots):
        held = source.choice([0, 0, source.randrange(1, 4), source.randrange(1, 50_000)])
        match = source.choice([0, 0, held, min(held, source.randrange(1, 2000))])
        seats.append(Seat(source.random() < 0.4, held, float(source.randrange(8)), match))
    return seats


def old_rule(seats: list[Seat], groups: int) -> int | None:
    """The rule of 0.1.40.2 to 0.1.45, by elimination: candidates are narrowed step by step, and the first in scan order is taken."""
    size = len(seats) // groups
    order = [place * 1 + group * size for place in range(size) for group in range(groups)]
    left = [slot for slot in order if not seats[slot].busy]
    if not left:
        return None
    longest = max(seats[slot].match for slot in left)
    if longest >= (1 if groups == 1 else 512):
        return [slot for slot in left if seats[slot].match == longest][0]
    if groups > 1:
        load = {group: sum(1 for slot in range(group * size, group * size + size) if seats[slot].busy) for group in range(groups)}
        least = min(load[slot // size] for slot in left)
        left = [slot for slot in left if load[slot // size] == least]
    if any(seats[slot].held == 0 for slot in left):
        left = [slot for slot in left if seats[slot].held == 0]
    oldest = min(seats[slot].used for slot in left)
    return [slot for slot in left if seats[slot].used == oldest][0]


@pytest.mark.parametrize(("slots", "groups"), [(1, 1), (3, 1), (8, 1), *SHAPES])
def test_without_the_switches_it_is_the_old_rule(slots: int, groups: int) -> None:
    source = random.Random(f"{slots}/{groups}")
    for _ in range(3000):
        seats = random_seats(source, slots)
        expected = old_rule(seats, groups)
        assert pick_slot(seats, groups, now=10.0, low_first=False) == expected, seats
        if groups == 1:
            assert pick_slot(seats, groups, now=10.0, low_first=True, expire_s=0.0) == expected


@pytest.mark.parametrize(("slots", "groups"), SHAPES)
def test_low_first_never_leaves_a_free_slot_below_in_the_group(slots: int, groups: int) -> None:
    source, size = random.Random(slots * groups), slots // groups
    busy, used, clock = [False] * slots, [0.0] * slots, 0.0
    for _ in range(2000):
        clock += 1
        taken = [slot for slot in range(slots) if busy[slot]]
        if taken and (len(taken) == slots or source.random() < 0.5):
            leaving = source.choice(taken)
            busy[leaving], used[leaving] = False, clock
            continue
        seats = [Seat(busy[slot], source.randrange(2) * 5, used[slot]) for slot in range(slots)]
        pick = pick_slot(seats, groups, now=clock)
        assert pick is not None and not busy[pick]
        assert all(busy[slot] for slot in range(pick // size * size, pick)), f"{pick} has a hole below it: {busy}"
        busy[pick] = True


def test_picks_spread_over_the_groups_first() -> None:
    busy: list[int] = []
    for _ in range(6):
        pick = pick_slot([Seat(slot in busy) for slot in range(6)], 3, now=0.0)
        assert pick is not None
        busy.append(pick)
    assert busy == [0, 2, 4, 1, 3, 5]


def test_the_idle_group_of_a_4x2_layout_gives_its_first_slot() -> None:
    seats = [Seat(slot in (0, 2, 4), 0, 0.0 if slot % 2 else 5.0) for slot in range(8)]
    assert pick_slot(seats, 4, now=9.0, low_first=True) == 6
    assert pick_slot(seats, 4, now=9.0, low_first=False) == 7
    after = [seat._replace(busy=seat.busy or slot == 6) for slot, seat in enumerate(seats)]
    assert pick_slot(after, 4, now=9.0) in (1, 3, 5, 7)


def test_low_first_opens_an_idle_group_before_it_fills_a_hole() -> None:
    seats = [Seat(True), Seat(False), Seat(False), Seat(True), Seat(False), Seat(False)]
    assert pick_slot(seats, 3, now=0.0) == 4


@pytest.mark.parametrize(("match", "pick"), [(MIN_GROUP_MATCH - 1, 0), (MIN_GROUP_MATCH, 5), (MIN_GROUP_MATCH + 1, 5)])
def test_a_short_match_does_not_unbalance_the_groups(match: int, pick: int) -> None:
    seats = [Seat(slot == 4, 600 if slot == 5 else 0, 0.0, match if slot == 5 else 0) for slot in range(8)]
    assert pick_slot(seats, 4, now=1.0) == pick


def test_expiry_moves_the_side_request_away_from_the_long_conversation() -> None:
    # A: 40,250 tokens, idle for 30 s. B: 1,781 tokens, idle for 20 s. A third slot decodes.
    seats = [Seat(False, 40_250, 70.0), Seat(False, 1_781, 80.0), Seat(True)]
    assert pick_slot(seats, 1, now=100.0, expire_s=0.0) == 0
    assert pick_slot(seats, 1, now=100.0, expire_s=600.0) == 1
    assert pick_slot(seats, 1, now=100.0, expire_s=25.0) == 0, "A has expired"
    assert pick_slot(seats, 1, now=100.0, expire_s=20.0) == 0, "both have: the least recently used"
    exact = [Seat(False, 9, 80.0), Seat(False, 1, 90.0)]
    assert pick_slot(exact, 1, now=100.0, expire_s=20.0) == 0, "idle for exactly that long has expired"
    equal = [Seat(False, 5, 99.0), Seat(False, 5, 98.0)]
    assert pick_slot(equal, 1, now=100.0, expire_s=600.0) == 0, "as short as each other: the scan order decides"
    assert pick_slot([*seats, Seat(False, 0, 99.0)], 1, now=100.0, expire_s=600.0) == 3, "an empty slot wins"
    assert pick_slot([seats[0]._replace(match=40_250), seats[1]], 1, now=100.0, expire_s=600.0) == 0, "a match wins"


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(0, 9))
def test_expiry_takes_the_oldest_expired_else_the_shortest(rows: list[tuple[int, int]], expire: int) -> None:
    seats = [Seat(False, held, float(used)) for held, used in rows]
    pick = pick_slot(seats, 1, now=9.0, expire_s=float(expire))
    assert pick is not None
    expired = [used for _, used in rows if expire and 9 - used >= expire]
    if expired or not expire:
        assert rows[pick][1] == min(expired or [used for _, used in rows])
    else:
        assert rows[pick][0] == min(held for held, _ in rows)


def test_the_eviction_rule_is_the_same_for_pages_and_seats() -> None:
    assert eviction_key(9, 1.0, 10.0, 0.0) < eviction_key(1, 2.0, 10.0, 0.0)
    assert eviction_key(9, 1.0, 10.0, 20.0) > eviction_key(1, 2.0, 10.0, 20.0)
    assert eviction_key(5, 1.0, 10.0, 20.0) < eviction_key(5, 2.0, 10.0, 20.0), "as short as each other: the older one"


def test_scan_order_goes_over_the_groups() -> None:
    assert scan_order(8, 4) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert scan_order(3, 1) == [0, 1, 2]


@pytest.mark.parametrize(
    ("held", "prompt", "match"),
    [([], [1], 0), ([1], [1], 0), ([1], [1, 2], 1), ([1, 2], [1, 2, 3, 4], 2), ([1, 3], [1, 2, 3], 0), ([1, 2, 3], [1, 2], 0)],
)
def test_the_originals_match_is_full_containment(held: list[int], prompt: list[int], match: int) -> None:
    assert containment_match(held, prompt) == match


@pytest.mark.parametrize(
    ("slots", "stages", "asked", "groups"),
    [(8, 1, 0, 1), (8, 4, 0, 4), (3, 2, 0, 1), (8, 3, 0, 2), (6, 4, 0, 3), (8, 4, 1, 1), (8, 1, 2, 2)],
)
def test_groups_are_the_largest_divisor_that_the_stages_can_use(slots: int, stages: int, asked: int, groups: int) -> None:
    assert choose_groups(slots, stages, asked) == groups


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 6), st.integers(1, 64))
def test_chunks_end_on_the_grid_or_at_the_end(start: int, rest: int, grids: int, grid: int) -> None:
    total = start + rest
    end = chunk_end(start, total, grids * grid, grid)
    assert start < end <= total and end - start <= grids * grid
    assert end == total or end % grid == 0


def test_the_shortest_rest_reads_first_until_somebody_waited_long_enough() -> None:
    long, short = Reader(900, 1, 0), Reader(10, 2, 0)
    assert pick_reader([long, short], 4) == 1
    assert pick_reader([long._replace(overtaken=4), short], 4) == 0
    assert pick_reader([short._replace(overtaken=9), long._replace(overtaken=4)], 4) == 1, "among those, in order of arrival"
    assert pick_reader([Reader(5, 7, 0), Reader(5, 3, 0)], 4) == 1, "ties go to the older"


def test_retry_after_grows_with_the_queue_and_stays_in_bounds() -> None:
    assert retry_after(0, 8, 0.1) == 1
    assert retry_after(15, 8, 3.0) == 6
    assert retry_after(1000, 1, 100.0) == 60


@pytest.mark.parametrize(
    "changes",
    [{"slots": 0}, {"slots": 8, "groups": 3}, {"queue_limit": -1}, {"rows": "all"}, {"decode_share": -0.1}, {"expire_s": -1.0}],
)
def test_a_policy_that_makes_no_sense_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(SettingError):
        SlotPolicy(**changes)  # type: ignore[arg-type]
