"""The life of requests: queue, deadline, pinning, stop, cancel, failure, death, drain. Exactly one terminal event each."""

from __future__ import annotations

import pytest

from strata.errors import ClientError, ContextExceeded, Draining, EngineDead, EngineError, QueueFull
from strata.messages import CopyDone, EngineFailed, Failed, Finished, Progress, SegmentResult, WindowDone
from strata.request import Placement
from strata.slots.events import Abort, Cancel, Drain, IllegalEvent, Stop, Tick
from strata.slots.policy import SlotPolicy
from tests.slots.house import House

PROMPT = tuple(range(10))


def test_a_request_runs_from_prompt_to_finish() -> None:
    house = House()
    answer = house.chat("a", PROMPT, max_tokens=6)
    assert len(answer) == 6
    assert [window.kind for window in house.windows] == ["prompt"] * 2 + ["decode"] * 5
    assert [event.read for event in house.progress["a"]] == [0, 8, 10]
    assert house.machine.is_idle and house.states()[0] == "held"
    assert [slot.idle_s for slot in house.machine.view(house.now + 5).slots] == [pytest.approx(5), 0, 0, 0], "never used is not idle"


def test_the_next_turn_reads_only_what_is_new() -> None:
    house = House()
    answer = house.chat("a", PROMPT)
    house.chat("b", PROMPT + tuple(answer) + (1, 2, 3))
    assert house.cached("b") == 14, "the prompt and all generated tokens but the last"
    assert house.slot("b") == house.slot("a")
    assert house.progress["b"][0] == Progress("b", 14, 18, 14, 0)


def test_usage_tells_the_times() -> None:
    house = House(SlotPolicy(slots=1))
    house.ask("first", PROMPT, max_tokens=3)
    house.ask("second", PROMPT + (1,), max_tokens=3)
    while "second" not in house.ended:
        house.land(1.0)
    usage = house.ended["second"].usage
    # The first: two chunks and two decode windows. The second goes on from its first page multiple below 10.
    assert (usage.queue_s, usage.prompt_s, usage.decode_s) == (4.0, 1.0, 2.0)
    assert (usage.prompt, usage.cached, usage.generated) == (11, 8, 3)


def test_a_stop_token_ends_the_answer_and_is_delivered() -> None:
    house = House()
    full = house.chat("a", PROMPT, max_tokens=20)
    house.chat("b", PROMPT, max_tokens=20, stop_tokens=frozenset({full[4]}))
    terminal = house.ended["b"]
    assert isinstance(terminal, Finished) and terminal.reason == "stop"
    assert house.tokens["b"] == full[:full.index(full[4]) + 1]


def test_the_context_is_the_limit() -> None:
    house = House(context=20)
    house.chat("a", PROMPT, max_tokens=10)
    assert len(house.tokens["a"]) == 10
    with pytest.raises(ContextExceeded) as caught:
        house.ask("b", PROMPT, max_tokens=11)
    assert caught.value.extra == {"n_prompt_tokens": 10, "n_ctx": 20}
    with pytest.raises(ContextExceeded):
        house.ask("c", tuple(range(21)), max_tokens=0)
    house.chat("d", tuple(range(20)), max_tokens=0)


def test_a_prompt_larger_than_the_pool_is_refused() -> None:
    house = House(num_pages=4)
    with pytest.raises(ContextExceeded):
        house.ask("a", tuple(range(16)))
    house.chat("b", tuple(range(15)))


def test_refusals_change_nothing() -> None:
    house = House()
    house.ask("a", PROMPT)
    before = house.machine.view(0.0)
    for prompt, placement in ((PROMPT, Placement(slot=4)), (PROMPT, Placement(slot=-1))):
        with pytest.raises(ClientError, match="id_slot must be 0 to 3"):
            house.ask("b", prompt, placement=placement)
    with pytest.raises(IllegalEvent, match="in use"):
        house.ask("a", PROMPT)
    with pytest.raises(IllegalEvent, match="needs a prompt"):
        house.ask("b", ())
    for event in (WindowDone(77, ()), WindowDone(1, ()), CopyDone(5), EngineFailed("x", (77,))):
        with pytest.raises(IllegalEvent):
            house.send(event)
    assert house.machine.view(0.0) == before
    assert house.send(Cancel("nobody")) == house.send(Stop("nobody")) == []


# ---- the queue


def test_more_requests_than_slots_wait_in_order() -> None:
    house = House(SlotPolicy(slots=2))
    for number in range(5):
        house.ask(str(number), (number,) * 5, max_tokens=3)
    assert house.machine.view(0.0).waiting == 3
    house.run()
    seated = [name for name in sorted(house.requests, key=lambda name: house.ended[name].usage.queue_s)]
    assert seated == ["0", "1", "2", "3", "4"]


def test_the_queue_has_a_cap_and_says_when_to_come_back() -> None:
    house = House(SlotPolicy(slots=1, queue_limit=2))
    for number in range(3):
        house.ask(str(number), (number,) * 5)
    with pytest.raises(QueueFull, match="2 requests are waiting") as caught:
        house.ask("3", PROMPT)
    assert caught.value.retry_after == 3 and caught.value.status == 503
    assert "3" not in house.machine.desk.runs


def test_a_queue_of_zero_takes_what_can_sit_at_once() -> None:
    house = House(SlotPolicy(slots=1, queue_limit=0))
    house.ask("a", PROMPT)
    with pytest.raises(QueueFull):
        house.ask("b", PROMPT)
    house.run()
    house.chat("c", PROMPT)


def test_a_deadline_in_the_queue() -> None:
    house = House(SlotPolicy(slots=1, queue_timeout=5.0))
    house.ask("a", PROMPT, max_tokens=100)
    house.ask("patient", PROMPT, deadline=50.0)
    house.ask("hurried", PROMPT)
    house.ask("most patient", PROMPT, deadline=60.0)
    assert house.machine.wake_at() == 5.0
    house.now = 4.0
    house.send(Tick())
    assert "hurried" not in house.ended
    house.now = 5.0
    house.send(Tick())
    error = house.error("hurried")
    assert isinstance(error, QueueFull) and "waited 5 s" in error.message and error.retry_after
    assert house.machine.wake_at() == 50.0
    house.run()
    house.check("patient")


def test_a_wait_of_less_than_a_second_is_told_as_it_was() -> None:
    house = House(SlotPolicy(slots=1))
    house.ask("a", PROMPT, max_tokens=100)
    house.ask("hurried", PROMPT, deadline=0.3)
    house.now = 0.3
    house.send(Tick())
    assert "waited 0.3 s" in house.error("hurried").message


def test_a_pinned_request_waits_for_its_slot_and_lets_others_pass() -> None:
    house = House(SlotPolicy(slots=2))
    house.ask("a", PROMPT, max_tokens=20)
    assert house.slot("a") == 0
    house.ask("pinned", (7,) * 5, placement=Placement(slot=0))
    house.ask("free", (8,) * 5, max_tokens=1)
    assert house.slot("free") == 1
    house.run()
    house.check("pinned")
    assert house.slot("pinned") == 0


# ---- leaving


def test_a_cancel_frees_the_seat_within_one_window_and_keeps_the_history() -> None:
    house = House()
    house.ask("a", PROMPT, max_tokens=50)
    for _ in range(6):
        house.land()
    house.cancel("a")
    assert house.was_cancelled("a") and house.states()[0] == "leaving"
    house.land()
    assert house.states()[0] == "held" and house.machine.is_idle
    answer = tuple(house.tokens["a"])
    house.chat("b", PROMPT + answer + (1,))
    assert house.cached("b") == 10 + len(answer), "all delivered tokens were fed, the last one by the window in flight"


def test_a_waiting_request_can_be_cancelled() -> None:
    house = House(SlotPolicy(slots=1))
    house.ask("a", PROMPT)
    house.ask("b", PROMPT)
    house.cancel("b")
    assert house.was_cancelled("b") and house.machine.view(0.0).waiting == 0
    assert house.ended["b"].usage.prompt == 0


def test_a_stop_string_finishes_now() -> None:
    house = House()
    house.ask("a", PROMPT, max_tokens=50)
    for _ in range(5):
        house.land()
    commands = house.send(Stop("a"))
    assert isinstance(commands[0], Finished) and commands[0].reason == "stop"
    assert house.send(Stop("a")) == house.send(Cancel("a")) == []
    house.run()
    assert house.states()[0] == "held"


# ---- failures


def test_one_bad_row_fails_alone() -> None:
    house = House()
    for number in range(3):
        house.ask(str(number), (number,) * 5, max_tokens=30)
    while house.states().count("decoding") < 3:
        house.land()
    while len(house.engine.windows[0].segments) < 3:
        house.land()
    done = house.engine.land_window()
    house.send(WindowDone(done.window_id, (done.results[0], SegmentResult(error="row 1 is NaN"), done.results[2])))
    error = house.error("1")
    assert isinstance(error, EngineError) and "NaN" in error.message
    assert house.states()[1] == "empty", "what a bad row wrote is not kept"
    assert house.machine.counters.evictions["error"] == 1
    house.run()
    house.check("0")
    house.check("2")


def test_a_lost_window_fails_its_requests_and_no_others() -> None:
    house = House(SlotPolicy(slots=4, groups=2), num_stages=2)
    for number in range(4):
        house.ask(str(number), (number,) * 5, max_tokens=30)
    while house.states().count("decoding") < 4:
        house.land()
    window = house.engine.lose_window()
    house.send(EngineFailed("stage 1 ran out of memory", (window.id,)))
    lost = {segment.request_id for segment in window.segments}
    assert lost and all("stage 1" in str(house.error(name)) for name in lost)
    house.run()
    for name in set("0123") - lost:
        house.check(name)


def test_a_chunk_behind_a_lost_one_is_not_believed() -> None:
    house = House(num_stages=2)
    house.ask("a", tuple(range(40)))
    house.engine.lose_window()
    house.send(EngineFailed("stage 0", (1,)))
    assert isinstance(house.error("a"), EngineError) and house.states()[0] == "leaving"
    house.land()
    assert house.states()[0] == "empty" and house.machine.is_idle
    assert house.machine.counters.evictions["error"] == 0, "a history of which nothing was held is not lost"


def test_a_dead_engine_ends_everything_once_and_refuses_the_rest() -> None:
    house = House(SlotPolicy(slots=2, cache_bytes=100_000), num_pages=20)
    house.chat("held", (1,) * 9)
    for number in range(4):
        house.ask(str(number), (number,) * 30, max_tokens=10)
    house.send(EngineFailed("the GPU has fallen off the bus"))
    assert all(isinstance(house.error(str(number)), EngineDead) for number in range(4))
    assert house.machine.dead and house.machine.is_idle
    assert not house.machine.view(0.0).running + house.machine.view(0.0).waiting
    with pytest.raises(EngineDead, match="fallen off the bus"):
        house.ask("late", PROMPT)
    assert house.send(WindowDone(1, ())) == house.send(CopyDone(1)) == house.send(EngineFailed("again")) == []


# ---- the end


def test_a_drain_finishes_what_was_admitted() -> None:
    house = House(SlotPolicy(slots=1))
    house.ask("a", PROMPT)
    house.ask("b", PROMPT)
    house.send(Drain())
    with pytest.raises(Draining):
        house.ask("c", PROMPT)
    house.run()
    house.check("a")
    house.check("b")
    assert house.machine.is_idle


def test_an_abort_cuts_everything_off() -> None:
    house = House(SlotPolicy(slots=1))
    house.ask("a", PROMPT)
    house.ask("b", PROMPT)
    house.send(Abort("going down"))
    for name in "ab":
        assert isinstance(house.ended[name], Failed) and isinstance(house.error(name), Draining)
    house.run()
    assert house.machine.is_idle
