"""More requests than pages: who waits."""

from __future__ import annotations

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


def test_a_group_without_pages_gets_them_though_the_last_group_wants_none() -> None:
    house = House(SlotPolicy(slots=4, groups=2), num_pages=8, num_stages=2)
    house.ask("first", (1,) * 4, max_tokens=20, placement=Placement(slot=0))
    house.ask("second", (2,) * 5, max_tokens=20, placement=Placement(slot=1))
    house.run()
    house.check("first")
    house.check("second")
    assert house.machine.counters.preemptions
