"""The life of requests in the machine: queue, chunks, decode windows, stop, cancel, failure, drain."""

from __future__ import annotations

from strata.messages import Finished
from tests.slots.house import House


def test_a_request_runs_from_prompt_to_finish():
    house = House()
    answer = house.chat("a", tuple(range(10)), max_tokens=6)
    assert len(answer) == 6
    assert house.ended["a"] == Finished("a", "length", house.ended["a"].usage, 0)
    assert [window.kind for window in house.windows] == ["prompt"] * 2 + ["decode"] * 5
    assert house.machine.is_idle


def test_the_next_turn_reads_only_what_is_new():
    house = House()
    prompt = tuple(range(10))
    answer = house.chat("a", prompt)
    house.chat("b", prompt + tuple(answer) + (1, 2, 3))
    assert house.cached("b") == 14  # the prompt and all generated tokens but the last
    assert house.slot("b") == house.slot("a")
