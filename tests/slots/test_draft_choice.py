"""How many drafts the machine asks for: as many as pay, by what windows took and how drafts fared."""

from __future__ import annotations

import pytest

from strata.slots.policy import SlotPolicy
from strata.slots.speculation import NEW_STEPS, PERIOD, PROBE
from tests.slots.drafters import mixed, right_for
from tests.slots.house import House
from tests.slots.test_grouping import Timed
from tests.slots.test_speculation import PROMPT, decode, dear_rows, house, rows_of


def run_for(one: House, tokens: int, name: str = "a") -> None:
    one.chat(name, PROMPT, max_tokens=tokens)


def test_drafts_that_lose_are_switched_off_and_tried_now_and_then() -> None:
    one = house(right_for(0))
    one.engine.costs = dear_rows
    run_for(one, 900)
    drafts = [window.segments[0].num_drafts for window in decode(one)]
    assert sum(count > 0 for count in drafts) < 0.06 * len(drafts)
    assert any(drafts[PERIOD * PROBE // 2:]), "but they are tried again"


def test_drafts_that_become_good_come_back() -> None:
    one = house(right_for(0))
    one.engine.costs = lambda rows, drafts: (1 + 0.05 * rows, 0.05 * drafts)
    run_for(one, 900)
    assert one.machine.counters.drafts < 200
    one.engine.drafter = right_for(9)
    run_for(one, 900, "b")
    last = [window.segments[0].num_drafts for window in decode(one)[-40:]]
    assert sum(last) > 2.5 * len(last), "and then there are as many as can be"


def test_right_drafts_that_cost_more_than_they_bring_are_not_wanted() -> None:
    """A row that takes as long as a window brings nothing, however good the drafts are."""
    one = house(right_for(9))
    one.engine.costs = dear_rows
    run_for(one, 600)
    assert one.machine.counters.drafts < 0.1 * 600


def test_the_depth_follows_acceptance() -> None:
    one = house(right_for(1), most=7)
    one.engine.costs = lambda rows, drafts: (1 + 0.1 * rows, 0.05 * drafts)
    for name in "abc":
        run_for(one, 600, name)
    wanted = [window.segments[0].draft_limits.mtp for window in decode(one)[-100:]]
    assert wanted.count(1) > 80, "the second is never right"


@pytest.mark.parametrize("copying", [4, 8])
def test_eight_slots_of_which_some_copy_get_drafts(copying: int) -> None:
    """At three places in ten those that copy find what follows, here and there; nobody knows before it was tried."""

    def drafter(segment, truth):  # type: ignore[no-untyped-def]
        does = int(segment.request_id[1:]) < copying and segment.end * 7919 % 1000 < 300
        return right_for(15, "lookup", most=15)(segment, truth) if does else ((), "")

    one = house(drafter, slots=8, most=15, num_pages=4000, context=2000, max_rows=128, draft_sources=("lookup",))
    one.engine.costs = lambda rows, drafts: (1 + 0.055 * rows, 0.0)
    for number in range(8):
        one.ask(f"r{number}", (number, 1), max_tokens=300)
    one.run()
    assert one.machine.counters.accepted["lookup"] > 0.4 * copying * 300


def test_a_head_is_asked_for_few_steps_more_than_were_measured() -> None:
    one = house(right_for(15), most=15)
    one.engine.costs = lambda rows, drafts: (1 + 0.02 * rows, 0.02 * drafts)
    run_for(one, 600)
    wanted = [window.segments[0].draft_limits.mtp for window in decode(one)]
    assert next(filter(None, wanted)) <= NEW_STEPS
    assert all(wanted[at] <= max(wanted[:at], default=0) + NEW_STEPS for at in range(len(wanted)))
    assert max(wanted) == 15


def test_each_source_is_judged_by_itself() -> None:
    """The lookup is right, the head is not."""

    def drafter(segment, truth):  # type: ignore[no-untyped-def]
        is_lookup = segment.draft_limits.lookup and segment.end % 2
        return right_for(9, "lookup")(segment, truth) if is_lookup else right_for(0)(segment, truth)

    one = house(drafter)
    one.engine.costs = lambda rows, drafts: (1 + 0.1 * rows, 0.0)
    for name in "abc":
        run_for(one, 600, name)
    wanted = [window.segments[0].draft_limits for window in decode(one)[-100:]]
    assert sum(limits.lookup == 3 for limits in wanted) > 90
    drafted = one.machine.counters.drafted
    assert 0 < drafted["mtp"] < 0.08 * drafted["lookup"], "where the lookup finds nothing, the head is hardly tried"


def test_choices_are_the_same_every_time() -> None:
    windows = []
    for _ in range(2):
        one = house(mixed(5))
        one.engine.costs = lambda rows, drafts: (1 + 0.1 * rows, 0.1 * drafts)
        for number in range(4):
            one.ask(f"r{number}", (number, 1), max_tokens=100)
        one.run()
        windows.append(rows_of(one))
    assert windows[0] == windows[1]


@pytest.mark.parametrize(("most", "groups"), [(0, 1), (3, 2)])
def test_slots_with_drafts_are_grouped_by_their_rows(most: int, groups: int) -> None:
    """One row each: one window for all. Four rows each, all of them right: a window for each group, and both are full of drafts."""
    one = Timed(
        lambda stage, rows: (2.0, 0.5)[stage] + 0.1 * rows, SlotPolicy(slots=8, groups=0), drafter=right_for(9, "lookup"), num_stages=2,
        num_pages=4000, context=2000, max_rows=32, max_drafts=most, draft_sources=("lookup",),
    )
    for number in range(8):
        one.ask(f"r{number}", (number, 1, 2), max_tokens=800)
    while not one.ended:
        one.land()
    assert one.machine.view(one.now).groups == groups
    last = decode(one)[-24:-12]
    assert {(len(window.segments), len(segment.tokens)) for window in last for segment in window.segments} == {(8 // groups, most + 1)}
    one.run()
    for number in range(8):
        one.check(f"r{number}")


@pytest.mark.parametrize("most", [0, 3])
def test_decoders_keep_their_share_beside_a_long_prompt(most: int) -> None:
    """After a chunk of a second, windows for half a second, however many rows they have; one more goes out with the next chunk."""
    one = house(right_for(9), slots=3, most=most, num_pages=2000, context=3000)
    for name in "ab":
        one.ask(name, (ord(name), 1), max_tokens=800)
    while one.states().count("decoding") < 2:
        one.land()
    one.ask("long", tuple(range(80)), max_tokens=1)
    while "long" not in one.ended:
        one.land(1.0 if one.engine.windows[0].kind == "prompt" else 0.125)
    chunks = [place for place, window in enumerate(one.windows) if window.segments[0].request_id == "long"]
    assert {after - before - 1 for before, after in zip(chunks, chunks[1:])} == {5}
