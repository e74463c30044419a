"""Faults that random histories have found, each as the shortest history that shows it."""

from __future__ import annotations

from strata.messages import CopyDone, EngineFailed, SegmentResult, WindowDone
from strata.request import Placement
from strata.slots.policy import SlotPolicy
from tests.slots.house import House


def test_the_pages_that_a_next_turn_gives_back_count_as_room_for_it() -> None:
    # The held conversation has 12 of 13 pages; its regeneration needs 13 and drops one of its own.
    house = House(SlotPolicy(slots=1), num_pages=13)
    prompt = tuple(range(44))
    house.chat("first", prompt, max_tokens=4)
    house.chat("again", prompt[:43] + (7,) * 8, max_tokens=1)
    assert house.slot("again") == house.slot("first")


def test_the_lender_may_be_the_one_who_loses_the_seat() -> None:
    house = House(SlotPolicy(slots=1, shelf=False))
    house.chat("lender", tuple(range(12)), marks=(12,))
    house.chat("borrower", (*range(8), 9, 9, 9), marks=(11,))
    assert house.cached("borrower") == 8


def test_a_conversation_on_its_way_to_a_pinned_seat_is_not_the_shelfs_oldest() -> None:
    house = House(SlotPolicy(slots=2, shelf_limit=1))
    house.chat("a", (1,) * 9)
    house.now += 1
    house.chat("b", (2,) * 9)
    house.now += 1
    house.chat("c", (3,) * 9)  # takes a's seat; a is shelved, and the shelf is full
    house.now += 1
    # a goes to slot 1, where b sits: b needs a place on the shelf while a still has one.
    house.chat("a again", (1,) * 9 + tuple(house.tokens["a"]) + (5,), placement=Placement(slot=1))
    assert house.cached("a again") == 13 and house.slot("a again") == 1


def test_a_request_that_is_preempted_while_its_last_chunk_flies_keeps_the_first_token() -> None:
    # Three old answers eat the pages; the youngest has its last chunk in flight when it must make way.
    house = House(SlotPolicy(slots=4), num_pages=16)
    for number in range(3):
        house.now += 1
        house.ask(f"old{number}", (number,) * 3, max_tokens=24)
    while house.states().count("decoding") < 3:
        house.land()
    while True:
        free = house.machine.memory.pages.num_free
        if free == 2 and "young" not in house.requests:
            house.ask("young", (9,) * 7, max_tokens=6)
        if house.engine.is_idle:
            break
        house.land()
    for name in house.requests:
        house.check(name)
        assert len(house.tokens[name]) == house.requests[name].max_tokens
    assert house.machine.counters.preemptions


def test_a_prompt_of_exactly_the_pool_can_be_read() -> None:
    house = House(SlotPolicy(slots=2), num_pages=4)
    house.chat("scored", tuple(range(16)), max_tokens=0, prompt_logprobs=0)
    assert house.logprobs["scored"] == list(range(1, 16))


def test_prompt_logprobs_are_not_sent_twice_when_a_history_is_read_again() -> None:
    # A recurrent model resumes below where it was, in the middle of what was reported already.
    house = House(SlotPolicy(slots=2), num_pages=20, snapshots=True, snapshot_every=8)
    house.ask("old", (1,) * 8, max_tokens=40)
    house.now += 1
    house.ask("scored", tuple(range(20)), max_tokens=40, prompt_logprobs=0)
    house.run()
    house.check("old")
    house.check("scored")
    assert house.machine.counters.preemptions
    assert house.logprobs["scored"] == list(range(1, 20))


def test_a_preempted_request_whose_image_is_lost_reads_its_text_again() -> None:
    house = House(SlotPolicy(slots=2), num_pages=20)
    for name in "ab":
        house.now += 1
        house.ask(name, (ord(name), *range(7)), max_tokens=40, prompt_logprobs=0)
    lost = 0
    while not house.engine.is_idle:
        if house.engine.copies:
            done = house.engine.land_copy()
            house.send(CopyDone(done.copy_id, "" if lost else "no memory"))
            lost += 1
        else:
            house.land()
    for name in "ab":
        house.check(name)
        assert house.logprobs[name] == list(range(7)), "delivered once"
    assert lost and house.machine.counters.evictions["copy_failed"] == 1


def test_a_preempted_request_whose_row_was_bad_fails() -> None:
    house = House(SlotPolicy(slots=2, groups=2), num_pages=20, num_stages=2)
    for name in "ab":
        house.now += 1
        house.ask(name, (ord(name),) * 8, max_tokens=40)
    while not house.machine.view(house.now).preempted:
        house.land()
    assert house.states()[1] == "leaving"
    while house.engine.windows[0].segments[0].request_id != "b":
        house.land()
    done = house.engine.land_window()
    house.send(WindowDone(done.window_id, (SegmentResult(error="NaN"),)))
    assert "NaN" in str(house.error("b"))
    house.run()
    house.check("a")


def test_a_window_that_is_lost_after_its_request_ended_costs_the_history_only() -> None:
    house = House()
    house.ask("a", tuple(range(6)), max_tokens=50)
    house.land()
    house.cancel("a")
    window = house.engine.lose_window()
    house.send(EngineFailed("stage 0", (window.id,)))
    assert house.states()[0] == "empty" and house.machine.is_idle


def test_an_idle_history_never_pushes_a_running_answers_image_out() -> None:
    house = House(SlotPolicy(slots=3, cache_bytes=22_000), num_pages=20)
    for name in "abc":
        house.now += 1
        house.ask(name, (ord(name),) * 16, max_tokens=40)
    while house.machine.view(house.now).parked < 2:
        house.send(house.engine.land_copy() if house.engine.copies else house.engine.land_window())
    house.cancel("a")
    house.run()
    for name in "bc":
        house.check(name)
    assert house.engine.prompt_tokens == 48, "nobody's text was read again"


def test_an_image_that_is_ready_after_its_request_was_cancelled_obeys_the_limit() -> None:
    house = House(SlotPolicy(slots=2, cache_bytes=3000), num_pages=20)
    for name in "ab":
        house.now += 1
        house.ask(name, (ord(name),) * 8, max_tokens=40)
    while not house.engine.copies:
        house.land()
    house.cancel("b")
    house.send(house.engine.land_copy())
    assert house.machine.view(house.now).parked_bytes == 0
    house.run()
    house.check("a")
