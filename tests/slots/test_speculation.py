"""Drafts in the machine: what they may not touch (limits, rows, pages, other slots), how they end, how their number is chosen."""

from __future__ import annotations

import random

import pytest

from strata.messages import Cancelled, Finished, Segment, Usage, Window
from strata.request import Sampling
from strata.slots.events import Stop
from strata.slots.policy import SlotPolicy
from strata.slots.slot import Run
from tests.slots.drafters import greedy_engine, mixed, right_for
from tests.slots.fake_engine import Drafter, expected
from tests.slots.house import House

PROMPT = tuple(range(10))


def house(drafter: Drafter, slots: int = 4, most: int = 3, **changes: object) -> House:
    policy = changes.pop("policy", SlotPolicy(slots=slots))
    plain = dict(num_pages=400, context=1000, max_rows=32, max_drafts=most, draft_sources=("mtp", "lookup"))
    return House(policy, drafter=drafter, **{**plain, **changes})  # type: ignore[arg-type]


def free_rows(rows: int, drafts: int) -> tuple[float, float]:
    return 1.0, 0.0


def dear_rows(rows: int, drafts: int) -> tuple[float, float]:
    return 0.1 + rows, 0.5 * drafts


def decode(one: House) -> list[Window]:
    return [window for window in one.windows if window.kind == "decode"]


def rows_of(one: House) -> list[list[int]]:
    return [[len(segment.tokens) for segment in window.segments] for window in decode(one)]


# ---------------------------------------------------------------- the answer stays as it is


@pytest.mark.parametrize("most", [1, 3, 7])
def test_right_drafts_bring_as_many_tokens_as_there_are_rows(most: int) -> None:
    one = house(right_for(9), most=most)
    one.engine.costs = free_rows
    one.chat("warm up", PROMPT, max_tokens=300)
    one.windows.clear()
    one.chat("a", (7, 7), max_tokens=200)
    assert rows_of(one).count([most + 1]) >= 200 // (most + 1) - 10 and sum(map(sum, rows_of(one))) == 199
    usage = one.ended["a"].usage
    assert usage.accepted == usage.drafted == 199 - len(decode(one)), "every token but one a window came as a draft"


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_no_draft_reaches_beyond_the_limit(max_tokens: int) -> None:
    one = house(right_for(9), most=7)
    one.engine.costs = free_rows
    one.chat("warm up", PROMPT, max_tokens=100)
    one.windows.clear()
    one.chat("a", (5, 5, 5), max_tokens=max_tokens)
    assert len(one.tokens["a"]) == max_tokens
    rows = [segment.end - 3 for window in decode(one) for segment in window.segments]
    assert max(rows, default=0) <= max_tokens - 1, "the last token is never fed"
    usage = one.ended["a"].usage
    assert usage.drafted == usage.accepted


def test_no_draft_reaches_beyond_the_context() -> None:
    one = house(right_for(9), context=24)
    one.chat("a", PROMPT, max_tokens=14)
    assert len(one.tokens["a"]) == 14 and max(segment.end for window in one.windows for segment in window.segments) == 23


@pytest.mark.parametrize("place", range(1, 12))
def test_a_stop_token_among_accepted_drafts_is_the_last_one_delivered(place: int) -> None:
    answer = expected(house(right_for(9)).ask("a", PROMPT, 30), 30)
    one = house(right_for(9))
    one.chat("a", PROMPT, 30, stop_tokens=frozenset({answer[place]}))
    assert one.tokens["a"] == answer[:answer.index(answer[place]) + 1]
    usage = one.ended["a"].usage
    assert usage.accepted <= usage.generated - 1 and usage.accepted <= usage.drafted
    held = one.machine.slots[0].conversation
    assert held is not None and list(held.tokens) == list(PROMPT) + one.tokens["a"][:-1], "what lay behind the stop is forgotten"


@pytest.mark.parametrize("right", [0, 1, 9])
def test_a_stop_string_in_the_middle_of_a_draft(right: int) -> None:
    """The window in flight is committed as far as it was right, and the next turn goes on from what its text shares."""
    one = house(right_for(right))
    one.engine.costs = free_rows
    one.ask("a", PROMPT, 40)
    for _ in range(6):
        one.land()
    assert decode(one)[-1].segments[0].num_drafts >= 2
    one.send(Stop("a"))
    terminal = one.ended["a"]
    assert isinstance(terminal, Finished) and terminal.reason == "stop"
    usage, counters = terminal.usage, one.machine.counters
    one.run()
    assert sum(counters.drafted.values()) == usage.drafted and sum(counters.accepted.values()) == usage.accepted, "too late to count"
    full = expected(one.requests["a"], 40)
    held = one.machine.slots[0].conversation
    assert held is not None and list(held.tokens) == [*PROMPT, *full[:len(held.tokens) - len(PROMPT)]]
    length, shared = len(held.tokens), len(PROMPT) + len(one.tokens["a"])
    one.chat("b", PROMPT + tuple(one.tokens["a"]) + (77, 78))
    assert one.cached("b") == (length if length <= shared else shared // 4 * 4)


def test_a_cancel_in_the_middle_of_a_draft() -> None:
    one = house(mixed(1))
    one.ask("a", PROMPT, 40)
    one.ask("b", (3, 3, 3), 40)
    flying: list[Segment] = []
    while not any(segment.num_drafts for segment in flying):
        one.land()
        flying = [segment for window in one.engine.windows for segment in window.segments if segment.request_id == "a"]
    assert "a" not in one.ended
    one.cancel("a")
    one.run()
    assert isinstance(one.ended["a"], Cancelled)
    one.check("b")
    one.chat("c", PROMPT + tuple(one.tokens["a"]) + (1, 2))


def test_more_drafts_than_were_asked_for_are_cut() -> None:
    one = house(greedy_engine, most=1)
    one.chat("a", PROMPT, max_tokens=50)
    assert max(map(max, rows_of(one))) == 2


def test_without_drafts_nothing_is_asked_for() -> None:
    one = house(right_for(9), most=0)
    one.chat("a", PROMPT, max_tokens=20)
    assert one.machine.scheduler.speculation is None
    assert all(segment.draft_limits.mtp == segment.draft_limits.lookup == 0 for window in one.windows for segment in window.segments)
    assert {segment.history for window in one.windows for segment in window.segments} == {None}
    assert one.ended["a"].usage == Usage(10, 0, 20, 0, 0, 0.0, pytest.approx(0.002), pytest.approx(0.019))


def test_a_lookup_and_penalties_get_the_text_as_it_grows() -> None:
    one = house(right_for(9, "lookup"))
    one.chat("a", PROMPT, max_tokens=20)
    one.chat("b", (4, 4), max_tokens=20, sampling=Sampling(repetition_penalty=1.1))
    histories = [segment.history for window in decode(one) for segment in window.segments if segment.request_id == "a"]
    live = [history for history in histories if history is not None]  # near the limit nothing is asked for
    assert histories[0] is not None and live[0] == (PROMPT, one.tokens["a"])
    assert len(live) > 2 and live[0][1] is live[-1][1], "no copies"


# ---------------------------------------------------------------- rows and pages


def test_rows_that_are_short_go_round() -> None:
    one = house(right_for(9), slots=8, most=3, max_rows=13)
    one.engine.costs = free_rows
    for number in range(8):
        one.ask(f"r{number}", (number, 1), max_tokens=60)
    one.run()
    full = [rows for rows in rows_of(one) if len(rows) == 8]
    assert max(map(sum, full)) == 13
    assert all(max(rows) - min(rows) <= 1 for rows in full), "nobody has two drafts while somebody has none"
    assert len({tuple(rows) for rows in full if sum(rows) == 13}) >= 8, "and who has one more goes round"
    for number in range(8):
        one.check(f"r{number}")


def test_a_window_with_no_row_to_spare_has_no_drafts() -> None:
    one = house(right_for(9), slots=5, max_rows=2)
    for number in range(5):
        one.ask(f"r{number}", (number, 1), max_tokens=20)
    one.run()
    assert all(sum(rows) <= 2 for rows in rows_of(one))
    for number in range(5):
        one.check(f"r{number}")


def test_pad_rows_count_as_rows() -> None:
    one = house(right_for(9), max_rows=6, policy=SlotPolicy(slots=4, rows="prefix"))
    for number in range(4):
        one.ask(f"r{number}", (number, 1), max_tokens=40 if number == 3 else 5)
    one.run()
    assert max(map(sum, rows_of(one))) == 6
    lonely = [window for window in decode(one) if [segment.request_id for segment in window.segments] == ["", "", "", "r3"]]
    assert {segment.num_drafts for window in lonely for segment in window.segments if not segment.request_id} == {0}
    assert any(window.segments[-1].num_drafts for window in lonely)
    one.check("r3")


@pytest.mark.parametrize(("pages", "takes"), [(6, False), (8, True)])
def test_drafts_take_no_page_that_another_slot_may_need(pages: int, takes: bool) -> None:
    """One of four slots decodes; three pages are free where its drafts would want one, or five."""
    one = house(right_for(0), most=7, num_pages=pages, context=pages * 4)
    one.engine.costs = free_rows
    one.chat("a", tuple(range(8)), max_tokens=16)
    spare = [len(segment.pages) - -(-(segment.start + 1) // 4) for window in decode(one) for segment in window.segments]
    assert (max(spare) > 0) == takes and any(segment.num_drafts for window in decode(one) for segment in window.segments)


def test_no_history_is_evicted_for_a_draft() -> None:
    one = house(right_for(0), slots=2, most=7, num_pages=12, context=48)
    one.engine.costs = free_rows
    one.chat("held", tuple(range(50, 74)), max_tokens=1)
    one.chat("a", (1, 2, 3), max_tokens=20)
    assert sum(one.machine.counters.evictions.values()) == 0 and one.states() == ["held", "held"]


@pytest.mark.parametrize("groups", [1, 2])
def test_nobody_makes_way_while_drafts_hold_pages(groups: int) -> None:
    seen = 0
    for seed in range(60):
        roll = random.Random(seed)
        one = house(
            right_for(0), most=7, num_pages=roll.randrange(14, 26), context=56, num_stages=groups,
            policy=SlotPolicy(slots=4, groups=groups, cache_bytes=1 << 20),
        )
        one.engine.costs = free_rows
        one.machine.scheduler.speculation._num_slots = 0  # type: ignore[union-attr]  # drafts take the last page
        watch_preemptions(one)
        for number in range(5):
            prompt = tuple(roll.randrange(9) for _ in range(roll.randrange(2, 20)))
            one.ask(f"r{number}", prompt, max_tokens=roll.randrange(5, 30))
            for _ in range(roll.randrange(1, 14)):
                if not one.engine.is_idle:
                    count = len(decode(one))
                    one.land()
                    if groups == 1 and len(decode(one)) > count and left_out(one):
                        assert not any(map(spare_pages, one.machine.scheduler._decoding()))
        one.run()
        for number in range(5):
            one.check(f"r{number}")
        seen += one.machine.counters.preemptions
    assert seen > 20


def left_out(one: House) -> bool:
    """Whether a slot that could decode is in no window: it lacks a page."""
    return any(not run.in_flight for run in one.machine.scheduler._decoding())


def spare_pages(run: Run) -> bool:
    """Whether it has a page that its own next token does not need."""
    assert run.conversation is not None
    return len(run.conversation.pages) > -(-(run.submitted + (not run.in_flight)) // 4)


def watch_preemptions(one: House) -> None:
    """Whenever somebody makes way, no decoding slot has a page to spare."""
    preempt = one.machine.desk.preempt

    def watched(run: Run) -> None:
        assert not any(map(spare_pages, one.machine.scheduler._decoding()))
        preempt(run)

    one.machine.desk.preempt = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("groups", [1, 2])
def test_who_is_preempted_drops_its_drafts_and_goes_on_with_the_same_tokens(groups: int) -> None:
    one = house(right_for(1), num_pages=14, context=56, num_stages=groups, policy=SlotPolicy(slots=2, groups=groups, cache_bytes=1 << 20))
    one.ask("a", (1, 1), max_tokens=40)
    one.ask("b", (2, 2), max_tokens=40)
    resumed = None
    while "b" not in one.ended:
        one.land()
        run = one.machine.desk.runs.get("b")
        if run is not None and run.state.value == "preempted":
            resumed = len(one.windows)
            assert run.drafts is not None and run.drafts.tokens == ()
    assert one.machine.counters.preemptions > 0 and resumed is not None
    first = next(segment for window in one.windows[resumed:] for segment in window.segments if segment.request_id == "b")
    assert first.num_drafts == 0
    one.run()
    one.check("a")
    one.check("b")
