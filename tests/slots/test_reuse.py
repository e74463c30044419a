"""Continue and borrow: who goes on from what. Every answer is compared with a cold run; pages have 4 tokens."""

from __future__ import annotations

import pytest

from strata.messages import EngineFailed
from strata.request import Placement
from strata.slots.events import Cancel, Stop
from strata.slots.policy import SlotPolicy
from tests.slots.house import House

SYSTEM = tuple(range(100, 120))  # 20 tokens: five full pages
ALICE, BOB = (1, 2, 3), (4, 5, 6)


def test_two_agents_with_one_system_prompt_keep_their_conversations() -> None:
    house = House()
    first = house.chat("alice", SYSTEM + ALICE, marks=(22,))
    house.chat("bob", SYSTEM + BOB, marks=(22,))
    assert house.slot("bob") != house.slot("alice")
    assert house.cached("bob") == 20, "the five full pages of the system prompt are borrowed"
    house.chat("alice 2", SYSTEM + ALICE + tuple(first) + (7, 7), marks=(29,))
    assert house.slot("alice 2") == house.slot("alice")
    assert house.cached("alice 2") == 23 + 4, "the prompt and all generated tokens but the last"


def test_two_agents_that_arrive_together_read_the_system_prompt_once() -> None:
    house = House()
    system = tuple(range(50)) * 2
    house.ask("alice", system + ALICE, marks=(102,))
    house.ask("bob", system + BOB, marks=(102,))
    assert house.states().count("reading") == 1, "bob waits for what alice reads"
    house.run()
    house.check("alice")
    house.check("bob")
    assert house.engine.prompt_tokens == 103 + 3
    assert house.cached("bob") == 100


def test_a_busy_slot_lends_what_it_has_read() -> None:
    house = House()
    house.ask("alice", SYSTEM + ALICE, max_tokens=30)
    while "decoding" not in house.states():
        house.land()
    house.ask("bob", SYSTEM + BOB)
    assert house.progress["bob"][0].cached == 20
    house.run()
    house.check("alice")
    house.check("bob")


def test_a_request_that_waits_goes_on_alone_when_the_other_is_cancelled() -> None:
    house = House()
    house.ask("alice", tuple(range(60)))
    house.ask("bob", tuple(range(60)))
    house.land()
    house.cancel("alice")
    house.run()
    house.check("bob")
    assert house.was_cancelled("alice")


def test_others_pass_a_request_that_waits_for_a_prefix() -> None:
    house = House()
    house.ask("alice", tuple(range(60)))
    house.ask("bob", tuple(range(60)))
    house.ask("carol", (9, 9, 9))
    assert "carol" in house.progress and "bob" not in house.progress
    house.run()
    house.check("bob")


def test_four_identical_requests_get_their_own_answers() -> None:
    house = House()
    for name in "abcd":
        house.ask(name, SYSTEM)
    house.run()
    for name in "abcd":
        house.check(name)
    assert len({house.slot(name) for name in "abcd"}) == 4


@pytest.mark.parametrize(("length", "borrowed"), [(3, 0), (4, 4), (5, 4), (7, 4), (8, 8), (9, 8)])
def test_full_pages_are_borrowed_at_every_edge(length: int, borrowed: int) -> None:
    house = House()
    house.chat("long", SYSTEM + ALICE, marks=(22,))
    house.chat("short", SYSTEM[:length] + (0, 0, 0), marks=(length + 2,))
    assert house.cached("short") == borrowed
    assert house.slot("short") != house.slot("long")


@pytest.mark.parametrize("length", [8, 9, 11, 12])
def test_an_exact_full_match_reads_at_least_one_token(length: int) -> None:
    house = House()
    prompt = SYSTEM[:length]
    house.chat("first", prompt)
    house.chat("again", prompt)
    assert house.cached("again") == (length - 1) // 4 * 4
    assert house.slot("again") == house.slot("first"), "regenerating continues the conversation"
    assert house.tokens["again"] == house.tokens["first"]


def test_regenerating_after_the_reply_was_dropped_or_rendered_anew_continues() -> None:
    house = House()
    house.chat("first", SYSTEM + ALICE, marks=(22,))
    house.chat("second", SYSTEM + ALICE + (88, 88, 7, 7), marks=(26,))
    assert house.slot("second") == house.slot("first")
    assert house.cached("second") == 20


def test_editing_an_earlier_message_borrows_and_leaves_the_conversation_alone() -> None:
    house = House()
    answer = house.chat("first", SYSTEM + ALICE, marks=(23,))
    house.chat("edited", SYSTEM[:10] + (0,) + SYSTEM[11:] + ALICE, marks=(23,))
    assert house.cached("edited") == 8 and house.slot("edited") != house.slot("first")
    house.chat("on", SYSTEM + ALICE + tuple(answer) + (1,), marks=(29,))
    assert house.cached("on") == 27 and house.slot("on") == house.slot("first")


def test_a_raw_prompt_is_its_own_anchor() -> None:
    house = House()
    house.chat("first", SYSTEM)
    house.chat("shares all but two", SYSTEM[:18] + (0, 0))
    house.chat("shares all but one", SYSTEM[:19] + (0,))
    assert house.slot("shares all but two") != house.slot("first")
    assert house.slot("shares all but one") == house.slot("first")


def test_a_conversation_cut_off_in_its_prompt_is_continued_from_what_was_read() -> None:
    house = House()
    house.ask("first", tuple(range(60)), marks=(60,))
    house.land()
    house.land()
    house.cancel("first")
    house.run()
    house.chat("again", tuple(range(60)), marks=(60,))
    assert house.slot("again") == house.slot("first") and house.cached("again") == 24
    assert house.traces[-1].shared == 24, "what was not read is not remembered"


@pytest.mark.parametrize("leave", [Stop, Cancel])
def test_a_next_turn_that_is_quicker_than_the_last_window_waits_for_it(leave: type[Stop | Cancel]) -> None:
    house = House()
    house.ask("first", SYSTEM + ALICE, max_tokens=50, marks=(22,))
    for _ in range(8):
        house.land()
    house.send(leave("first"))
    answer = tuple(house.tokens["first"])
    house.ask("next", SYSTEM + ALICE + answer + (7, 7), marks=(24 + len(answer),))
    assert house.states()[0] == "leaving" and "next" not in house.progress
    house.land()
    assert house.slot("next") == 0 and house.cached("next") == 23 + len(answer) > 24, "the whole of the answer too"
    house.run()
    house.check("next")


def test_a_next_turn_that_waited_in_vain_reads_its_prompt() -> None:
    house = House()
    house.ask("first", SYSTEM + ALICE, max_tokens=50)
    for _ in range(5):
        house.land()
    house.send(Stop("first"))
    house.ask("next", SYSTEM + ALICE + (7, 7))
    house.send(EngineFailed("stage 0", (house.engine.lose_window().id,)))
    assert house.cached("next") == 0, "a history is not kept when its last window was lost"
    house.run()
    house.check("next")


def test_a_chat_moves_with_its_pages_to_a_pinned_slot() -> None:
    house = House()
    answer = house.chat("first", SYSTEM)
    assert house.slot("first") == 0
    house.chat("next", SYSTEM + tuple(answer) + (5,), placement=Placement(slot=2))
    assert house.slot("next") == 2 and house.cached("next") == 24
    assert house.states() == ["empty", "empty", "held", "empty"]


def test_a_shared_page_is_never_written_even_at_the_live_end() -> None:
    # Both continue inside the third page of the same history; the one that borrows gets two pages, not two and a half.
    house = House()
    answer = house.chat("first", SYSTEM[:8], max_tokens=4)
    house.ask("branch", SYSTEM[:8] + tuple(answer) + (1, 1), placement=Placement(keep=False))
    house.ask("next", SYSTEM[:8] + tuple(answer) + (2, 2))
    house.run()
    house.check("branch")
    house.check("next")
    assert (house.cached("branch"), house.cached("next")) == (8, 11)


def test_twenty_thousand_shared_tokens_are_read_once() -> None:
    house = House(SlotPolicy(slots=2), num_pages=2000, page_tokens=64, context=40_000, chunk=2048, prompt_grid=128)
    system = tuple(token % 997 for token in range(20_000))
    house.engine.is_trusting = True  # the fake engine's full check of every context would take minutes here
    house.ask("alice", system + ALICE, marks=(20_002,))
    house.ask("bob", system + BOB, marks=(20_002,))
    house.run()
    house.check("alice")
    house.check("bob")
    assert house.cached("bob") == 20_000 // 64 * 64
    assert house.engine.prompt_tokens == 20_003 + (20_003 - house.cached("bob"))


# ---- keys, tenants, one-shot calls


def test_a_key_narrows_who_may_continue() -> None:
    house = House()
    house.chat("mine", SYSTEM, placement=Placement(key="mine"))
    house.chat("other", SYSTEM + (1,), placement=Placement(key="other"))
    assert house.slot("other") != house.slot("mine") and house.cached("other") == 20, "another key borrows, it does not take over"
    house.chat("mine again", SYSTEM + (1,), placement=Placement(key="mine"))
    assert house.slot("mine again") == house.slot("mine")


def test_a_key_breaks_ties_between_equal_matches() -> None:
    house = House()
    house.chat("a", SYSTEM, placement=Placement(key="a"))
    house.chat("b", SYSTEM, placement=Placement(key="b"))
    house.chat("a again", SYSTEM + (3,), placement=Placement(key="a"))
    assert house.slot("a again") == house.slot("a")


def test_a_key_goes_before_an_equal_match_without_a_key_that_is_fresher() -> None:
    house = House()
    house.ask("mine", SYSTEM, placement=Placement(key="a"))
    house.ask("keyless", SYSTEM, max_tokens=20)
    house.run()
    house.chat("mine again", SYSTEM + (3,), placement=Placement(key="a"))
    assert house.slot("mine again") == house.slot("mine") != house.slot("keyless")


def test_a_longer_prefix_of_somebody_elses_is_borrowed_rather_than_read_again() -> None:
    house = House()
    house.chat("short", SYSTEM[:12], placement=Placement(key="mine"))
    house.chat("long", SYSTEM + ALICE, placement=Placement(key="other"))
    house.chat("next", SYSTEM + BOB, placement=Placement(key="mine"))
    assert house.cached("next") == 20 and house.slot("next") not in (house.slot("short"), house.slot("long"))


def test_a_side_call_under_the_same_key_is_a_stranger_without_a_match() -> None:
    house = House()
    house.chat("chat", SYSTEM + ALICE, marks=(22,), placement=Placement(key="k"))
    house.chat("title", (50, 51, 52) + SYSTEM, placement=Placement(key="k"))
    assert house.slot("title") != house.slot("chat") and house.cached("title") == 0


def test_tenants_share_nothing() -> None:
    house = House()
    house.chat("one", SYSTEM, placement=Placement(tenant="one"))
    house.chat("two", SYSTEM, placement=Placement(tenant="two"))
    assert house.cached("two") == 0
    house.chat("one again", SYSTEM, placement=Placement(tenant="one"))
    assert house.cached("one again") == 16


def test_cache_prompt_false_reads_everything_and_leaves_nothing() -> None:
    house = House()
    house.chat("chat", SYSTEM)
    house.chat("cold", SYSTEM, placement=Placement(reuse=False))
    assert house.cached("cold") == 0 and house.slot("cold") != house.slot("chat")
    assert house.states() == ["held", "empty", "empty", "empty"]


@pytest.mark.parametrize("shelf", [True, False])
@pytest.mark.parametrize("placement", [Placement(keep=False), Placement(reuse=False)])
def test_a_one_shot_call_displaces_nobodys_history(shelf: bool, placement: Placement) -> None:
    house = House(SlotPolicy(slots=2, shelf=shelf))
    answers = [house.chat(name, SYSTEM + extra) for name, extra in (("a", ALICE), ("b", BOB))]
    house.chat("title", (50, 51, 52), placement=placement)
    for name, extra, answer in (("a", ALICE, answers[0]), ("b", BOB, answers[1])):
        house.chat(f"{name} 2", SYSTEM + extra + tuple(answer) + (9,))
        assert house.cached(f"{name} 2") == 27


def test_a_one_shot_call_borrows_but_never_takes_over() -> None:
    house = House()
    house.chat("chat", SYSTEM)
    house.chat("title", SYSTEM + (1, 2), placement=Placement(keep=False))
    assert house.cached("title") == 20 and house.slot("title") != house.slot("chat")
    assert house.machine.slots[house.slot("chat")].conversation is not None


def test_prompt_logprobs_turn_reuse_off_and_lose_none_at_chunk_edges() -> None:
    house = House()
    house.chat("chat", SYSTEM)
    house.chat("scored", SYSTEM, prompt_logprobs=0)
    assert house.cached("scored") == 0
    assert house.logprobs["scored"] == list(SYSTEM[1:])
