"""What runs next: chunks and decode windows, shares, overtaking, rows, groups. Chunks have 8 tokens, the grid 4."""

from __future__ import annotations

import pytest

from strata.errors import SettingError
from strata.messages import EngineFacts, Window
from strata.request import Sampling
from strata.slots.machine import SlotMachine
from strata.slots.policy import SlotPolicy
from tests.slots.house import House
from tests.slots.test_grouping import Timed, unlike


def kinds(windows: list[Window]) -> str:
    return "".join("d" if window.kind == "decode" else "p" for window in windows)


def decoders(house: House, count: int, tokens: int = 60) -> None:
    for number in range(count):
        house.ask(f"d{number}", (number,) * 3, max_tokens=tokens)
    while house.states().count("decoding") < count:
        house.land()


def test_a_prompt_is_cut_on_the_grid_and_picks_once() -> None:
    house = House()
    house.chat("a", tuple(range(21)), max_tokens=1)
    cuts = [(segment.start, segment.end, segment.sampling is not None) for window in house.windows for segment in window.segments]
    assert cuts == [(0, 8, False), (8, 16, False), (16, 21, True)]


def test_a_continued_prompt_returns_to_the_grid() -> None:
    house = House()
    answer = house.chat("a", tuple(range(21)), max_tokens=2)
    house.windows.clear()
    house.chat("b", tuple(range(21)) + tuple(answer) + (1,) * 20, max_tokens=1)
    assert [(window.segments[0].start, window.segments[0].end) for window in house.windows] == [(22, 28), (28, 36), (36, 43)]


def test_a_decoding_slot_waits_for_one_chunk_at_most() -> None:
    house = House()
    decoders(house, 3)
    house.ask("long", tuple(range(100)))
    while house.states().count("reading"):
        house.land(1.0)
    assert "pp" not in kinds(house.windows[3:]), "between two chunks everybody decodes"


@pytest.mark.parametrize(("share", "windows"), [(0.0, 0), (0.5, 4), (1.0, 8)])
def test_after_a_chunk_the_others_decode_for_their_share_of_its_time(share: float, windows: int) -> None:
    house = House(SlotPolicy(slots=4, decode_share=share), num_pages=200)
    decoders(house, 2, 150)
    house.ask("long", tuple(range(80)), max_tokens=1)
    while "long" not in house.ended:
        house.land(1.0 if house.engine.windows[0].kind == "prompt" else 0.125)
    chunks = [place for place, window in enumerate(house.windows) if window.segments[0].request_id == "long"]
    assert len(chunks) == 10
    # The window that is sent together with the next chunk comes on top.
    assert {after - before - 1 for before, after in zip(chunks, chunks[1:])} == {windows + 1}


def test_with_nobody_decoding_every_stage_gets_a_chunk() -> None:
    house = House(num_stages=3)
    house.ask("long", tuple(range(60)))
    assert kinds(house.windows) == "ppp"
    house.land()
    assert len(house.engine.windows) == 3


def test_the_shorter_prompt_overtakes_at_a_chunk_boundary() -> None:
    house = House()
    house.ask("long", tuple(range(60)))
    house.ask("short", (9,) * 4, max_tokens=1)
    house.land()
    house.land()
    assert "short" in house.ended and "long" not in house.tokens


def test_overtaking_is_bounded() -> None:
    house = House(SlotPolicy(slots=4, max_overtaken=3))
    house.ask("long", tuple(range(60)), max_tokens=1)
    number = 0
    while "long" not in house.ended:
        if len(house.machine.desk.runs) < 3:
            house.ask(f"s{number}", (100 + number,) * 8, max_tokens=1)
            number += 1
        house.land()
    order = [window.segments[0].request_id for window in house.windows if window.kind == "prompt"]
    places = [place for place, name in enumerate(order) if name == "long"]
    assert places == [*range(places[0], places[0] + 1), *range(4, 11)], f"overtaken three times, then in one go: {order}"


def test_only_who_came_later_overtakes() -> None:
    house = House(SlotPolicy(slots=4, max_overtaken=1))
    house.ask("old", tuple(range(16)), max_tokens=1)
    house.ask("long", (7,) * 60, max_tokens=1)
    house.land()
    house.ask("short", (9,) * 4, max_tokens=1)
    house.run()
    order = [window.segments[0].request_id for window in house.windows]
    assert order[:4] == ["old", "old", "short", "long"], "two chunks of an older prompt are nothing to be patient about"


def test_a_cancel_takes_effect_between_chunks() -> None:
    house = House()
    house.ask("long", tuple(range(100)))
    house.cancel("long")
    assert house.was_cancelled("long") and house.states()[0] == "leaving"
    house.land()
    assert house.states()[0] == "held" and house.engine.prompt_tokens == 8
    assert house.ended["long"].usage.prompt == 0, "nothing had been read when it left"


def test_decode_windows_have_active_rows_only() -> None:
    house = House()
    decoders(house, 3)
    house.cancel("d1")
    house.land()
    house.land()
    assert [segment.slot for segment in house.windows[-1].segments] == [0, 2]


def test_prefix_rows_run_every_slot_below_the_last_active_one() -> None:
    house = House(SlotPolicy(slots=4, rows="prefix"))
    decoders(house, 3)
    house.cancel("d1")
    house.land()
    house.land()
    window = house.windows[-1]
    assert [(segment.slot, segment.request_id) for segment in window.segments] == [(0, "d0"), (1, ""), (2, "d2")]
    pad = window.segments[1]
    assert (pad.tokens, pad.start, pad.sampling) == ((0,), 0, Sampling(temperature=0.0))
    assert pad.pages == (house.machine.memory.pad_page,)
    house.run()
    house.check("d0")
    house.check("d2")
    assert house.machine.counters.pad_rows > 0


def test_a_pad_row_never_touches_the_history_that_is_held_in_the_hole() -> None:
    house = House(SlotPolicy(slots=2, rows="prefix"))
    house.ask("a", (1,) * 9, max_tokens=2)
    house.ask("b", (2,) * 9, max_tokens=30)
    house.run()
    house.chat("a again", (1,) * 9 + tuple(house.tokens["a"]) + (5,))
    assert house.cached("a again") == 10


def test_every_group_has_one_window_in_flight() -> None:
    house = House(SlotPolicy(slots=4, groups=2), num_stages=2)
    decoders(house, 4)
    flying = [flight.window for flight in house.machine.scheduler.flights.values()]
    assert sorted(window.group for window in flying if window.kind == "decode") == [0, 1]
    assert [slot.group for slot in house.machine.slots] == [0, 0, 1, 1]
    house.run()
    for number in range(4):
        house.check(f"d{number}")


def test_groups_do_not_join_where_no_window_holds_them_all() -> None:
    house = Timed(unlike, SlotPolicy(slots=8, groups=0), num_stages=2, num_pages=400, max_rows=7)
    for number in range(6):
        house.ask(f"r{number}", (number, 1, 2), max_tokens=150)
    house.run()
    assert house.machine.scheduler.grouping.changes == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_more_slots_than_rows_take_turns(rows: int) -> None:
    house = House(SlotPolicy(slots=5), max_rows=rows, num_pages=200)
    decoders(house, 5)
    start = len(house.windows)
    for _ in range(25):
        house.land()
    names = [segment.request_id for window in house.windows[start:] for segment in window.segments]
    counts = [names.count(f"d{number}") for number in range(5)]
    assert sum(counts) == 25 * rows and max(counts) - min(counts) <= 1
    house.run()
    for number in range(5):
        house.check(f"d{number}")


def test_prefix_rows_of_a_group_must_fit_a_window() -> None:
    with pytest.raises(SettingError, match="raise batch_groups"):
        SlotMachine(EngineFacts(8, 4, 32, max_rows=2), SlotPolicy(slots=4, rows="prefix"))


def test_only_penalties_get_the_history() -> None:
    house = House()
    house.chat("plain", (1, 2, 3))
    house.chat("penalised", tuple(range(20)), max_tokens=3, sampling=Sampling(repetition_penalty=1.1))
    histories = {segment.request_id: segment.history for window in house.windows for segment in window.segments if segment.sampling}
    assert histories["plain"] is None
    assert histories["penalised"] == (tuple(range(20)), house.tokens["penalised"])


def test_an_answer_of_no_tokens_reads_its_prompt_and_ends() -> None:
    house = House()
    house.chat("a", tuple(range(10)), max_tokens=0)
    assert house.ended["a"].usage.generated == 0 and house.states()[0] == "held"
    assert all(segment.sampling is None for window in house.windows for segment in window.segments)
