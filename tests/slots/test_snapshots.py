"""Models whose state cannot be cut anywhere: a history is gone on from where a snapshot is, and nowhere else."""

from __future__ import annotations

from typing import Any

from strata.request import Placement
from strata.slots.policy import SlotPolicy
from tests.slots.house import House

SYSTEM = tuple(range(100, 120))  # 20 tokens: five full pages
ALICE, BOB = (1, 2, 3), (4, 5, 6)


def test_a_recurrent_model_resumes_only_where_a_snapshot_is() -> None:
    house = House(snapshots=True, snapshot_every=16)
    answer = house.chat("first", SYSTEM + ALICE, marks=(22,))
    house.chat("next", SYSTEM + ALICE + tuple(answer) + (9, 9), marks=(29,))
    assert house.cached("next") == 23, "the end of the last prompt, a turn boundary inside a page"
    house.chat("bob", SYSTEM + BOB, marks=(22,))
    assert house.cached("bob") == 16, "a borrower gets full pages up to a snapshot"


def test_two_agents_that_arrive_together_read_once_what_a_snapshot_covers() -> None:
    house = House(snapshots=True, snapshot_every=16)
    system = tuple(range(50)) * 2
    house.ask("alice", system + ALICE, marks=(102,))
    house.ask("bob", system + BOB, marks=(102,))
    house.run()
    house.check("alice")
    house.check("bob")
    assert house.cached("bob") == 96 and house.engine.prompt_tokens == 103 + 7


def test_nobody_waits_for_ever_where_no_snapshot_comes() -> None:
    house = House(snapshots=True, snapshot_every=1000)
    system = tuple(range(50)) * 2
    house.ask("alice", system + ALICE, marks=(102,), max_tokens=40)
    house.ask("bob", system + BOB, marks=(102,), max_tokens=1)
    while "bob" not in house.ended:
        house.land()
    assert "alice" not in house.ended and house.cached("bob") == 0


def test_snapshots_at_turn_boundaries_and_every_16384_tokens() -> None:
    sizes: dict[str, Any] = {"num_pages": 1200, "page_tokens": 64, "context": 40_000, "chunk": 2048, "prompt_grid": 128}
    house = House(SlotPolicy(slots=3), snapshots=True, snapshot_every=16_384, **sizes)
    house.engine.is_trusting = True
    system = tuple(token % 997 for token in range(20_000))
    answer = house.chat("alice", system + ALICE, marks=(20_002,))
    house.chat("bob", system + BOB, marks=(20_002,))
    assert house.cached("bob") == 16_384 and house.slot("bob") != house.slot("alice")
    house.chat("alice 2", system + ALICE + tuple(answer) + (9, 9), marks=(20_009,))
    assert house.cached("alice 2") == 20_003 and house.slot("alice 2") == house.slot("alice")


def test_a_snapshot_inside_a_page_that_was_lent_cannot_be_resumed() -> None:
    house = House(snapshots=True, snapshot_every=8)
    prompt = SYSTEM + ALICE
    house.chat("first", prompt, marks=(22,), max_tokens=12)
    # The borrower shares the page in which the first prompt ends, so the owner must not write it.
    house.ask("branch", prompt + tuple(house.tokens["first"][:-1]) + (1,), marks=(35,), placement=Placement(keep=False), max_tokens=40)
    house.land()
    assert house.progress["branch"][0].cached == 32
    house.ask("again", prompt + (8, 8), marks=(24,))
    house.run()
    house.check("branch")
    house.check("again")
    assert house.slot("again") == house.slot("first") and house.cached("again") == 16
