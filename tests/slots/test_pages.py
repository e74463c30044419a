"""The page allocator: counts, sharing, and books that notice when they are wrong."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from strata.request import Placement
from strata.slots.pages import OutOfPages, PageAllocator
from strata.slots.policy import SlotPolicy
from tests.slots.house import House


def test_a_shared_page_is_free_when_its_last_owner_lets_go() -> None:
    pages = PageAllocator(4)
    mine = pages.allocate(3)
    pages.share(mine[:2])
    assert pages.num_exclusive(mine) == 1 and pages.has_exclusive(mine) and not pages.has_exclusive(mine[:2])
    pages.release(mine)
    assert pages.num_free == 2
    pages.release(mine[:2])
    assert pages.num_free == 4


def test_too_many_pages_are_refused_and_none_is_taken() -> None:
    pages = PageAllocator(2)
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 of 2 free"):
        pages.allocate(3)
    assert pages.num_free == 2


def test_misuse_is_noticed() -> None:
    pages = PageAllocator(2)
    with pytest.raises(ValueError, match="is free"):
        pages.share([0])
    (page,) = pages.allocate(1)
    with pytest.raises(AssertionError, match="1 references counted and 0"):
        pages.check_integrity([])
    with pytest.raises(AssertionError, match="twice"):
        pages.check_integrity([[page, page]])
    pages.check_integrity([[page]])


@given(st.lists(st.tuples(st.sampled_from(["new", "borrow", "drop"]), st.integers(0, 5), st.integers(0, 5)), max_size=40))
def test_counts_are_those_of_the_tables(steps: list[tuple[str, int, int]]) -> None:
    pages, tables = PageAllocator(12), list[list[int]]()
    for action, which, count in steps:
        if action == "new" and count <= pages.num_free:
            tables.append(pages.allocate(count))
        elif action == "borrow" and tables:
            part = tables[which % len(tables)][:count]
            pages.share(part)
            tables.append(part)
        elif action == "drop" and tables:
            pages.release(tables.pop(which % len(tables)))
        pages.check_integrity(tables)
        assert pages.num_free == 12 - len({page for table in tables for page in table})


def test_page_kinds_add_up() -> None:
    house = House(SlotPolicy(slots=2), num_pages=40)
    house.chat("a", tuple(range(40)))
    house.chat("b", tuple(range(50, 60)))
    house.chat("c", (90, 91, 92))
    house.ask("d", (5,) * 9)
    view = house.machine.view(house.now)
    assert view.pages_free + view.pages_busy + view.pages_held + view.pages_shelved == view.pages_total == 40
    assert (view.pages_busy, view.pages_held, view.pages_shelved) == (3, 2, 15)


def test_an_image_of_which_nothing_can_be_used_is_not_copied() -> None:
    house = House(SlotPolicy(slots=1, shelf=False, cache_bytes=50_000))
    house.chat("A", (1, 2, 3))
    house.chat("B", tuple(range(50, 60)))
    house.chat("A again", (1, 2, 3))
    assert house.cached("A again") == 0 and [copy.direction for copy in house.copies] == ["out", "out"]


def test_a_one_shot_call_that_needs_pages_costs_the_shortest_history() -> None:
    house = House(SlotPolicy(slots=4), num_pages=18)
    answer = house.chat("long", tuple(range(40)))
    house.now += 1
    house.chat("short", tuple(range(50, 60)))
    house.chat("once", tuple(range(70, 86)), placement=Placement(keep=False))
    assert house.machine.counters.evictions["memory"] == 1
    house.chat("long again", (*range(40), *answer, 7))
    assert house.cached("long again") == 44, "although it had not been used for longer"


def test_of_equally_short_histories_the_older_one_goes_for_a_one_shot_call() -> None:
    house = House(SlotPolicy(slots=4), num_pages=10)
    answers = []
    for name in (1, 2):
        house.now += 1
        answers.append(house.chat(str(name), (name,) * 9))
    house.chat("once", (3,) * 9, placement=Placement(keep=False))
    house.chat("2 again", (*(2,) * 9, *answers[1], 7))
    assert house.cached("2 again") == 13 and house.machine.counters.evictions["memory"] == 1
