"""Several histories begin like the prompt: which one is gone on from, and which one lends. Pages have 4 tokens and 1000 bytes."""

from __future__ import annotations

import pytest

from strata.messages import CopyDone
from strata.request import Placement
from strata.slots.policy import SlotPolicy
from tests.slots.house import House

TEXT = tuple(range(100, 120))


def twins(policy: SlotPolicy, first: int, second: int) -> House:
    """Two requests with one prompt, in slots 0 and 1, whose answers have so many tokens."""
    house = House(policy)
    for slot, count in enumerate((first, second)):
        house.ask(f"twin{slot}", TEXT, max_tokens=count, placement=Placement(slot=slot))
    house.run()
    return house


@pytest.mark.parametrize(("first", "second", "fresher"), [(20, 2, 0), (2, 20, 1)])
def test_of_equal_matches_the_one_that_was_used_last(first: int, second: int, fresher: int) -> None:
    house = twins(SlotPolicy(slots=3), first, second)
    house.chat("next", TEXT + (1, 2))
    assert house.slot("next") == fresher


def test_of_equal_matches_one_that_is_on_the_device() -> None:
    house = twins(SlotPolicy(slots=2, shelf=False, cache_bytes=50_000), 2, 20)
    house.chat("side", (7, 7, 7), placement=Placement(slot=1))
    assert house.machine.view(house.now).parked == 1
    house.chat("next", TEXT + (1, 2))
    assert house.slot("next") == 0 and [copy.direction for copy in house.copies] == ["out"], "though the parked one is fresher"


def test_of_equal_lenders_one_that_is_on_the_device() -> None:
    house = House(SlotPolicy(slots=2, shelf=False, cache_bytes=50_000))
    house.chat("parked", TEXT + (1,) * 4, placement=Placement(slot=0))
    house.chat("device", TEXT + (2,) * 4, placement=Placement(slot=1))
    house.chat("side", (7, 7, 7), placement=Placement(slot=0))
    house.chat("borrower", TEXT + (3,) * 4, placement=Placement(slot=0))
    assert house.cached("borrower") == 20
    assert "in" not in [copy.direction for copy in house.copies]


def test_a_page_more_is_worth_waiting_for() -> None:
    house = House()
    house.chat("has a page", TEXT[:4] + (1,) * 4)
    house.ask("reads two", TEXT[:8] + (2,) * 40)
    house.ask("next", TEXT[:8] + (3,) * 4)
    assert "next" not in house.progress
    house.run()
    house.check("next")
    assert house.cached("next") == 8


def test_a_turn_without_a_key_leaves_the_conversation_its_key() -> None:
    house = House()
    answer = house.chat("mine", TEXT, placement=Placement(key="mine"))
    more = TEXT + tuple(answer) + (1, 2)
    house.chat("keyless", more)
    house.chat("other", more + (3,), placement=Placement(key="other"))
    assert house.slot("keyless") == house.slot("mine") != house.slot("other"), "another key borrows"


# ---- images that cannot be read


def fail_restore(house: House) -> None:
    """The oldest copy, which is one to the device, fails."""
    done = house.engine.land_copy()
    assert isinstance(done, CopyDone)
    house.send(CopyDone(done.copy_id, "the image is broken"))


def test_an_image_that_somebody_else_is_reading_outlives_a_failed_copy() -> None:
    house = House(SlotPolicy(slots=3, shelf=False, cache_bytes=50_000))
    house.chat("lender", TEXT + (1,) * 4, placement=Placement(slot=0))
    house.chat("side", (7, 7, 7), placement=Placement(slot=0))
    house.ask("one", TEXT + (2,) * 4, placement=Placement(slot=1))
    house.ask("two", TEXT[:12] + (3,) * 4, placement=Placement(slot=2))
    assert [copy.direction for copy in house.copies] == ["out", "in", "in"]
    fail_restore(house)
    assert "drop" not in [copy.direction for copy in house.copies]
    house.run()
    house.check("one")
    house.check("two")
    assert (house.cached("one"), house.cached("two")) == (0, 12)
