"""Shelf, parking, eviction, preemption: whose history survives when seats or pages are short. Pages have 4 tokens and 1000 bytes."""

from __future__ import annotations

import pytest

from strata.messages import Cancelled, CopyDone, Finished
from strata.request import Placement
from strata.slots.events import Tick
from strata.slots.policy import SlotPolicy
from tests.slots.house import House

A, B, SIDE = tuple(range(40)), tuple(range(50, 60)), (90, 91, 92)


def evictions(house: House) -> dict[str, int]:
    return {reason: count for reason, count in house.machine.counters.evictions.items() if count}


def follow_up(house: House, name: str, prompt: tuple[int, ...]) -> int:
    """The next turn of ``name``; returns how many tokens were cached."""
    house.now += 1
    house.chat(f"{name} again", prompt + tuple(house.tokens[name]) + (7,))
    return house.cached(f"{name} again")


def side_request(policy: SlotPolicy) -> House:
    """A and B are held, a third stream decodes, a side request of one line comes, and then A's and B's next turns."""
    house = House(policy)
    house.chat("A", A)
    house.now += 10
    house.chat("B", B)
    house.now += 10
    house.ask("stream", (33,), max_tokens=150)
    house.chat_beside("side", SIDE)
    return house


# ---- seats


def test_the_shelf_keeps_what_lost_its_seat() -> None:
    house = side_request(SlotPolicy(slots=3))
    assert house.slot("side") == house.slot("A"), "the seat of the least recently used conversation"
    assert house.machine.view(house.now).shelved == 1
    house.run()
    assert follow_up(house, "A", A) == 44 and follow_up(house, "B", B) == 14
    assert evictions(house) == {}


def test_without_shelf_and_cache_the_side_request_really_evicts_the_long_conversation() -> None:
    house = side_request(SlotPolicy(slots=3, shelf=False))
    assert house.slot("side") == house.slot("A") and evictions(house) == {"seat": 1}
    house.run()
    assert follow_up(house, "A", A) == 0


def test_with_expiry_it_takes_the_short_one() -> None:
    house = side_request(SlotPolicy(slots=3, shelf=False, expire_s=600.0))
    assert house.slot("side") == house.slot("B")
    house.run()
    assert follow_up(house, "A", A) == 44


def test_with_a_cache_the_displaced_conversation_is_parked_and_comes_back() -> None:
    house = side_request(SlotPolicy(slots=3, shelf=False, cache_bytes=50_000))
    house.run()
    assert house.machine.view(house.now).parked == 1 and house.machine.view(house.now).parked_bytes == 11_000
    assert follow_up(house, "A", A) == 44
    view = house.machine.view(house.now)
    assert view.counters.reuse["restored"] == 1 and evictions(house) == {}
    # A is back and not in both places; its seat's former owner went out for it.
    assert [copy.direction for copy in house.copies] == ["out", "out", "in", "drop"]
    assert view.parked == 1


def test_two_chats_in_one_slot_do_not_read_each_other_again() -> None:
    house = House(SlotPolicy(slots=1))
    texts = {"P": A, "Q": B}
    for name, prompt in texts.items():
        texts[name] = prompt + tuple(house.chat(name, prompt))
    for turn in range(2, 5):
        for name in "PQ":
            house.chat(f"{name}{turn}", texts[name] + (turn,))
            assert house.cached(f"{name}{turn}") == len(texts[name]) - 1
            texts[name] += (turn, *house.tokens[f"{name}{turn}"])


def test_a_full_shelf_loses_its_oldest() -> None:
    house = House(SlotPolicy(slots=1, shelf_limit=2))
    for name in range(4):
        house.now += 1
        house.chat(str(name), (name,) * 9)
    assert evictions(house) == {"shelf_full": 1} and house.machine.view(house.now).shelved == 2
    assert follow_up(house, "1", (1,) * 9) == 13


def test_a_pinned_request_finds_its_parked_conversation() -> None:
    house = House(SlotPolicy(slots=2, cache_bytes=50_000), num_pages=14)
    house.chat("A", A, placement=Placement(slot=0))
    house.chat("long", tuple(range(50, 80)))  # needs A's pages
    assert house.machine.view(house.now).parked == 1
    house.chat("A again", A + tuple(house.tokens["A"]) + (7,), placement=Placement(slot=0))
    assert house.cached("A again") == 44 and house.slot("A again") == 0


# ---- pages


def test_pages_go_by_the_eviction_rule() -> None:
    for expire, loser in ((0.0, "A"), (600.0, "B")):
        house = House(SlotPolicy(slots=4, expire_s=expire), num_pages=18)
        house.chat("A", A)
        house.now += 1
        house.chat("B", B)
        house.chat("third", tuple(range(70, 86)))
        assert evictions(house) == {"memory": 1}
        kept = {"A": B, "B": A}[loser]
        assert follow_up(house, "B" if loser == "A" else "A", kept) == len(kept) + 4


def test_a_history_that_frees_nothing_is_not_thrown_away_for_nothing() -> None:
    house = House(SlotPolicy(slots=4), num_pages=24)
    house.chat("A", A)
    house.now += 1
    house.chat("B", B)
    # All of A's eleven pages are also the borrower's: evicting A, the least recently used, would free none.
    held = A + tuple(house.tokens["A"][:4])
    house.ask("borrower", held + (1,), max_tokens=30, marks=(45,), placement=Placement(key="x", keep=False))
    house.land()
    assert house.cached("borrower") == 44
    house.now += 1
    house.chat_beside("other", tuple(range(100, 128)))
    assert evictions(house) == {"memory": 1}
    house.run()
    assert follow_up(house, "A", A) == 44 and follow_up(house, "B", B) == 0


def test_a_phantom_hit_is_impossible_after_a_full_eviction() -> None:
    house = House(SlotPolicy(slots=1), num_pages=16)
    house.chat("first", tuple(range(28)))
    house.chat("fills everything", tuple(range(100, 159)))
    house.chat("first again", tuple(range(28)))
    assert house.cached("first again") == 0


def test_making_room_never_takes_what_the_request_goes_on_from() -> None:
    # The pool is full, the parked or shelved source is itself the best victim.
    for cache in (0, 12_000):
        house = House(SlotPolicy(slots=1, cache_bytes=cache), num_pages=15)
        house.chat("A", A)
        house.now += 1
        house.chat("B", B)
        house.now += 1
        cached = follow_up(house, "A", A)
        assert cached == 44, f"cache {cache}"


def test_the_library_of_images_counts_the_incoming_one_and_drops_the_oldest() -> None:
    house = House(SlotPolicy(slots=1, shelf=False, cache_bytes=10_000), num_pages=30)
    for name in range(4):
        house.now += 1
        house.chat(str(name), (name,) * 9)  # 13 tokens held: 4 pages, 4000 bytes
    view = house.machine.view(house.now)
    assert view.parked == 2 and view.parked_bytes == 8000
    assert evictions(house) == {"host_full": 1}
    assert follow_up(house, "1", (1,) * 9) == 13
    assert follow_up(house, "0", (0,) * 9) == 0


def test_an_image_larger_than_the_cache_or_a_full_host_is_not_parked() -> None:
    for cache, free in ((3999, None), (10_000, 2560 << 20)):
        house = House(SlotPolicy(slots=1, shelf=False, cache_bytes=cache))
        house.send(Tick(free))
        house.chat("one", (1,) * 9)
        house.chat("two", (2,) * 9)
        assert house.machine.view(house.now).parked == 0 and evictions(house) == {"seat": 1}


def test_a_parked_prefix_is_lent_and_stays() -> None:
    house = House(SlotPolicy(slots=1, shelf=False, cache_bytes=50_000))
    house.chat("A", A, marks=(39,))
    house.chat("B", B)
    house.chat("C", A[:30] + (77, 78), marks=(31,))
    assert house.cached("C") == 28 and house.machine.counters.reuse["restored"] == 1
    house.chat("A again", A + tuple(house.tokens["A"]) + (7,), marks=(45,))
    assert house.cached("A again") == 44


def test_a_bad_image_is_read_once_and_never_tried_again() -> None:
    house = House(SlotPolicy(slots=1, shelf=False, cache_bytes=50_000))
    house.chat("A", A)
    house.chat("B", B)
    house.ask("A again", A + tuple(house.tokens["A"]) + (7,))
    while True:
        done = house.engine.land_copy()
        if house.copies[-1].id == done.copy_id and house.copies[-1].direction == "in":
            house.send(CopyDone(done.copy_id, "the image is broken"))
            break
        house.send(done)
    house.run()
    house.check("A again")
    assert house.cached("A again") == 0
    assert house.copies[-1].direction == "drop"


def test_a_next_turn_that_comes_while_its_conversation_is_copied_out_waits_for_it() -> None:
    house = House(SlotPolicy(slots=1, shelf=False, cache_bytes=50_000))
    house.chat("A", A)
    house.ask("B", B, max_tokens=2)
    house.ask("A again", A + tuple(house.tokens["A"]) + (7,))
    while house.engine.windows:
        house.land()
    assert "A again" not in house.progress and len(house.engine.copies) == 1
    house.run()
    house.check("A again")
    assert house.cached("A again") == 44


# ---- running requests


def crowd(house: House, count: int, tokens: int) -> list[str]:
    names = [f"r{number}" for number in range(count)]
    for number, name in enumerate(names):
        house.now += 1
        house.ask(name, (number,) * 8, max_tokens=tokens)
    return names


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("cache", [0, 50_000])
def test_the_youngest_is_parked_when_pages_run_out_and_answers_stay_the_same(cache: int, eager: bool) -> None:
    house = House(SlotPolicy(slots=4, cache_bytes=cache), num_pages=20, eager=eager)
    names = crowd(house, 4, 40)
    house.run()
    for name in names:
        house.check(name)
        assert len(house.tokens[name]) == 40
    assert house.machine.counters.preemptions > 0
    ends = [name for name in house.ended if isinstance(house.ended[name], Finished)]
    assert ends[0] == "r0", "the oldest is never the one that makes way"


def test_a_parked_answer_goes_on_decoding_and_reads_nothing_again() -> None:
    house = House(SlotPolicy(slots=2, queue_timeout=1.0), num_pages=20)
    crowd(house, 2, 40)
    while not house.machine.view(house.now).parked:
        house.send(house.engine.land_copy() if house.engine.copies else house.engine.land_window())
    house.now += 50
    house.send(Tick())  # the deadline is for the first wait only
    house.run()
    house.check("r1")
    assert house.machine.counters.preemptions and house.engine.prompt_tokens == 16


def test_it_is_length_only_where_a_request_alone_has_the_whole_pool() -> None:
    house = House(SlotPolicy(slots=2), num_pages=10)
    house.chat("held", (1,) * 9)
    house.ask("long", (2,) * 9, max_tokens=100)
    house.run()
    terminal = house.ended["long"]
    assert isinstance(terminal, Finished) and terminal.reason == "length"
    assert 9 + len(house.tokens["long"]) == 41, "ten pages of four, and one token that was picked and not fed"


def test_a_cancelled_parked_request_leaves_an_ordinary_image() -> None:
    house = House(SlotPolicy(slots=2, cache_bytes=3000), num_pages=20)
    crowd(house, 2, 40)
    while not house.machine.view(house.now).parked:
        house.send(house.engine.land_copy() if house.engine.copies else house.engine.land_window())
    assert house.machine.view(house.now).parked_bytes > 3000, "a running answer is kept over the limit"
    house.cancel("r1")
    assert isinstance(house.ended["r1"], Cancelled)
    assert house.machine.view(house.now).parked_bytes == 0, "but not an abandoned one"
    house.run()
    house.check("r0")


def test_a_preempted_request_keeps_the_token_that_was_on_its_way() -> None:
    # Two stages: the youngest can be made to leave while its window is in flight.
    house = House(SlotPolicy(slots=4, groups=2), num_pages=20, num_stages=2)
    names = crowd(house, 4, 40)
    house.run()
    for name in names:
        house.check(name)
        assert len(house.tokens[name]) == 40
    assert house.machine.counters.preemptions > 0
