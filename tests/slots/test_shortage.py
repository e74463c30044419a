"""More requests than pages: who waits."""

from __future__ import annotations

import pytest

from strata.errors import QueueFull
from strata.request import Placement
from strata.slots.policy import SlotPolicy
from tests.slots.house import House


def test_admission_waits_for_pages_instead_of_taking_them_from_running_requests() -> None:
    house = House(SlotPolicy(slots=4), num_pages=20)
    house.ask("first", (1,) * 40, max_tokens=8)
    house.ask("second", (2,) * 40, max_tokens=8)
    assert "second" not in house.progress and house.machine.view(house.now).waiting == 1
    house.ask("small", (3,))
    assert "small" not in house.progress, "who came later does not pass: the second would never find 11 pages"
    house.run()
    for name in ("first", "second", "small"):
        house.check(name)
    assert house.machine.counters.preemptions == 0


def test_nobody_loses_a_history_to_a_request_that_cannot_be_seated_even_so() -> None:
    for shelf in (True, False):
        house = House(SlotPolicy(slots=2, shelf=shelf), num_pages=20)
        house.chat("held", (1,) * 12)
        house.ask("running", (2,) * 40, max_tokens=8)
        house.ask("large", (3,) * 60)
        assert "large" not in house.progress and not sum(house.machine.counters.evictions.values())
        house.cancel("large")
        house.run()
        house.chat("held again", (1,) * 12 + tuple(house.tokens["held"]) + (5,))
        assert house.cached("held again") == 16


def test_room_that_is_only_missing_on_paper_is_made() -> None:
    # Two running answers share ten of their pages, so they have 14 of the pool's 20 and not 24.
    house = House(SlotPolicy(slots=4), num_pages=20)
    house.chat("held", (1,) * 12)
    house.ask("one", (2,) * 40 + (3,), max_tokens=4)
    while "decoding" not in house.states():
        house.land()
    house.ask("two", (2,) * 40 + (4,), max_tokens=4)
    house.ask("three", (5,) * 19)
    assert house.progress["two"][0].cached == 40 and "three" in house.progress
    house.run()
    for name in ("one", "two", "three"):
        house.check(name)


def test_who_lacks_pages_is_not_passed_because_somebody_reads_what_it_can_borrow_elsewhere() -> None:
    house = House(SlotPolicy(slots=4), num_pages=30)
    text = (1,) * 20
    house.chat("lender", text)
    house.ask("reader", text[:8] + (7,) * 40, placement=Placement(reuse=False))
    house.ask("blocked", text[:8] + (2,) * 72)
    house.ask("later", (3, 3))
    assert "blocked" not in house.progress and "later" not in house.progress
    house.run()
    for name in ("reader", "blocked", "later"):
        house.check(name)
    assert house.cached("blocked") == 8


def test_a_history_that_was_used_again_is_not_the_least_recently_used() -> None:
    house = House(SlotPolicy(slots=4), num_pages=10)
    for name in "aba":
        house.now += 1
        number = len(house.requests)
        house.chat(f"{name}{number}", (ord(name),) * 9)
    house.chat("third", (3,) * 9)
    assert house.machine.counters.evictions["memory"] == 1
    house.chat("a3", (ord("a"),) * 9)
    assert house.cached("a3") == 8


def test_the_refusal_knows_how_long_answers_take() -> None:
    house = House(SlotPolicy(slots=1, queue_limit=1))
    for number in range(30):
        house.ask(f"slow{number}", (number,) * 3, max_tokens=1)
        house.land(20.0)
    house.ask("sits", (50,))
    house.ask("waits", (51,))
    with pytest.raises(QueueFull) as caught:
        house.ask("refused", (52,))
    assert 30 < (caught.value.retry_after or 0) <= 40, "two before it, of nearly 20 s each"


def test_a_group_without_pages_gets_them_though_the_last_group_wants_none() -> None:
    house = House(SlotPolicy(slots=4, groups=2), num_pages=8, num_stages=2)
    house.ask("first", (1,) * 4, max_tokens=20, placement=Placement(slot=0))
    house.ask("second", (2,) * 5, max_tokens=20, placement=Placement(slot=1))
    house.run()
    house.check("first")
    house.check("second")
    assert house.machine.counters.preemptions
