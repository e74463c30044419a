"""What the machine tells of what it did: counters and traces."""

from __future__ import annotations

from tests.slots.house import House

PROMPT = tuple(range(10))


def test_counters_tell_what_happened() -> None:
    house = House()
    house.chat("a", PROMPT, max_tokens=4)
    house.chat("b", PROMPT + tuple(house.tokens["a"]) + (1,), max_tokens=4)
    counters = house.machine.view(0.0).counters
    assert counters.ended == {"stop": 0, "length": 2, "cancelled": 0, "failed": 0}
    assert counters.reuse == {"continued": 1, "borrowed": 0, "restored": 0, "none": 1}
    assert (counters.prompt_tokens, counters.cached_tokens, counters.generated_tokens) == (25, 13, 8)
    assert (counters.decode_windows, counters.decode_rows, counters.chunks, counters.chunk_tokens) == (6, 6, 3, 12)


def test_traces_tell_who_shared_what_with_whom() -> None:
    house = House()
    house.chat("a", PROMPT, max_tokens=4)
    house.chat("b", PROMPT + tuple(house.tokens["a"]) + (1,), max_tokens=4)
    house.chat("c", PROMPT[:8] + (77,), max_tokens=4)
    house.ask("runs on", PROMPT)
    one, two, three = house.traces
    assert (one.conversation, one.parent, one.shared, one.prompt, one.generated) == (1, 0, 0, 10, 4)
    assert (two.conversation, two.parent, two.shared, two.prompt, two.cached) == (1, 1, 13, 15, 13)
    assert (three.conversation, three.parent, three.shared, three.cached) == (2, 1, 8, 8)
