"""One window for all or one for each group: the formula against a pipeline that is played, the measuring, and the machine that obeys."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.messages import WindowDone
from strata.slots.grouping import AGAIN, FORGET, MEMORY, SAMPLES, WARM_UP, Grouping, StageTimes, turn
from strata.slots.policy import SlotPolicy
from tests.slots.house import House

Costs = Callable[[int, int], float]
"""Seconds of a stage (first argument) for a number of rows."""


def played_turn(windows: Sequence[Sequence[float]], between: float, turns: int = 200) -> float:
    """Seconds of one turn of windows that go round a pipeline: each stage serves one at a time, first come first served."""
    free = [0.0] * len(windows[0])
    arrivals = [(0.0, number, 0) for number in range(len(windows))]
    ends: dict[int, list[float]] = {number: [] for number in range(len(windows))}
    while len(ends[0]) < turns:
        now, number, stage = heapq.heappop(arrivals)
        free[stage] = max(now, free[stage]) + windows[number][stage]
        if stage + 1 < len(free):
            heapq.heappush(arrivals, (free[stage], number, stage + 1))
        else:
            ends[number].append(free[stage] + between)
            heapq.heappush(arrivals, (free[stage] + between, number, 0))
    half = turns // 2
    return (ends[0][-1] - ends[0][half]) / (turns - 1 - half)


@settings(max_examples=60)
@given(st.integers(1, 5), st.lists(st.floats(0.1, 5), min_size=1, max_size=5), st.floats(0, 3))
def test_equal_groups_turn_as_fast_as_the_formula_says(groups: int, stages: list[float], between: float) -> None:
    expected = max(groups * max(stages), sum(stages) + between)
    assert turn([stages] * groups, between) == pytest.approx(expected)
    assert played_turn([stages] * groups, between) == pytest.approx(expected)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 8), min_size=2, max_size=4), st.lists(st.tuples(st.floats(1, 3), st.floats(0.0, 1)), min_size=2, max_size=4))
def test_unequal_groups_turn_nearly_as_fast(rows: list[int], costs: list[tuple[float, float]]) -> None:
    windows = [[fixed + per_row * count for fixed, per_row in costs] for count in rows]
    played, said = played_turn(windows, 0.5), turn(windows, 0.5)
    assert said * 0.999 <= played <= said * 1.15


def test_the_two_limits_of_balanced_stages() -> None:
    """T(S) / T(1) = (a + b R) / (a + b R / S): 1 when weights dominate, S when rows do."""
    def gain(fixed: float, per_row: float, stages: int = 4, rows: int = 8) -> float:
        joined = turn([[fixed + per_row * rows] * stages], 0.0)
        return joined / turn([[fixed + per_row * rows / stages] * stages] * stages, 0.0)

    assert gain(1.0, 0.0) == pytest.approx(1.0)
    assert gain(0.0, 1.0) == pytest.approx(4.0)
    assert gain(2.0, 1.0) == pytest.approx((2 + 8) / (2 + 2))


# ---------------------------------------------------------------- what is measured


def observe(times: StageTimes, rows: int, stages: Sequence[float], count: int = WARM_UP + SAMPLES, trip: float | None = None) -> None:
    for _ in range(count):
        times.observe(rows, stages, trip)


def test_the_first_windows_of_a_size_do_not_count() -> None:
    times = StageTimes()
    observe(times, 4, (100.0, 100.0), WARM_UP)
    assert times.seconds(4) is None
    observe(times, 4, (1.0, 2.0), SAMPLES - 1)
    assert times.seconds(4) is None
    observe(times, 4, (1.0, 2.0), 1, trip=3.5)
    assert times.seconds(4) == pytest.approx((1.0, 2.0))
    assert 0 < times.between <= 0.5


def test_other_sizes_are_read_off_a_line() -> None:
    times = StageTimes()
    observe(times, 2, (1.2, 3.0))
    assert times.seconds(8) is None, "one size makes no line"
    observe(times, 4, (1.4, 3.0))
    assert times.seconds(8) == pytest.approx((1.8, 3.0))
    assert times.seconds(4) == pytest.approx((1.4, 3.0)), "what was measured is not guessed"


def test_averages_follow_what_changes() -> None:
    times = StageTimes()
    observe(times, 2, (1.0,))
    observe(times, 2, (3.0,), 10 * MEMORY)
    assert times.seconds(2) == pytest.approx((3.0,), rel=0.01)


def test_one_window_that_was_held_up_hardly_counts() -> None:
    times = StageTimes()
    observe(times, 2, (1.0,), WARM_UP + 10)
    times.observe(2, (50.0,), None)
    assert times.seconds(2) == pytest.approx((1 + 1 / 11,))


def test_what_was_not_measured_for_long_is_forgotten() -> None:
    times = StageTimes()
    observe(times, 2, (1.0,))
    observe(times, 8, (2.0,), FORGET + 1)
    assert times.seconds(2) is None
    times.observe(2, (5.0,), None)
    assert times.known[2].count == 1


# ---------------------------------------------------------------- the decision


def choose(
    fixed: Sequence[float], per_row: float, slots: tuple[int, ...], between: float = 0.0, rows: float = 1.0, drafting: float = 0.0,
) -> bool:
    grouping = Grouping()
    for number in (sum(slots), *slots):
        if number:
            stages = [each + per_row * number for each in fixed]
            observe(grouping.times, number, stages, trip=sum(stages) + between)
    return grouping.choose(slots, rows, drafting)


def test_unlike_stages_join_and_rows_part() -> None:
    """Each window pays the busiest stage's fixed part: three of 2 s each take longer than one window through 2 + 0.5 + 0.5 s."""
    assert choose((2.0, 0.5, 0.5), 0.01, (4, 4, 4))
    assert not choose((2.0, 0.5, 0.5), 1.0, (4, 4, 4))
    assert not choose((1.0, 1.0), 0.01, (4, 4)), "no gain either way: as it was"
    assert not choose((2.0, 1.0), 0.0, (4, 4), between=2.0), "the way between windows is walked by two at once"


def test_drafts_are_rows_and_every_window_drafts() -> None:
    assert choose((2.0, 0.5), 0.1, (4, 4)) and not choose((2.0, 0.5), 0.1, (4, 4), rows=4.0), "many rows part what few rows join"
    assert not choose((1.0, 1.0), 0.2, (4, 4)) and choose((1.0, 1.0), 0.2, (4, 4), drafting=2.0), "two windows draft twice a turn"


def test_an_unmeasured_way_is_tried_and_one_window_is_no_choice() -> None:
    grouping = Grouping()
    assert not grouping.choose((1, 0)), "nobody to join"
    assert not grouping.choose((1, 1)), "apart first"
    observe(grouping.times, 1, (1.0, 1.0))
    assert grouping.choose((1, 1)) is grouping.choose((1, 1))
    grouping.times.windows += AGAIN
    assert grouping.choose((1, 1)), "now together, to measure that"
    observe(grouping.times, 2, (1.9, 1.9))
    grouping.times.windows += AGAIN
    assert not grouping.choose((1, 1))
    assert grouping.changes == 2


def test_a_small_difference_changes_nothing() -> None:
    grouping = Grouping()
    observe(grouping.times, 1, (1.0, 1.0))
    observe(grouping.times, 2, (0.99, 0.99))
    assert not grouping.choose((1, 1))
    grouping.is_joined = True
    observe(grouping.times, 2, (1.01, 1.01), 100)
    grouping.times.windows += AGAIN
    assert grouping.choose((1, 1))


# ---------------------------------------------------------------- the machine


class Timed(House):
    """Windows report the seconds that ``costs`` says; every window takes its time, one after the other."""

    def __init__(self, costs: Costs, policy: SlotPolicy, **changes: object) -> None:
        super().__init__(policy, **changes)
        self.costs = costs
        self.steady: list[int] = []
        self.groups = 0

    def land(self, seconds: float = 0.0) -> list:
        window = self.engine.windows[0]
        done = self.engine.land_window()
        rows = sum(len(segment.tokens) for segment in window.segments)
        stages = tuple(self.costs(stage, rows) for stage in range(self.facts.num_stages))
        self.now += sum(stages)
        return self.send(WindowDone(done.window_id, done.results, sum(stages), stages))


def decode_windows(house: House) -> list[int]:
    return [len(window.segments) for window in house.windows if window.kind == "decode"]


def run_eight(costs: Costs, **policy: object) -> Timed:
    """Eight answers, checked, as they are when all of them have run for long."""
    house = Timed(costs, SlotPolicy(**{"slots": 8, "groups": 0, **policy}), num_stages=2, num_pages=400)
    for number in range(8):
        house.ask(f"r{number}", (number, 1, 2), max_tokens=150)
    while not house.ended:
        house.land()
    house.steady = decode_windows(house)[-44:-4]
    house.groups = house.machine.view(house.now).groups
    house.run()
    for number in range(8):
        house.check(f"r{number}")
    return house


def unlike(stage: int, rows: int) -> float:
    return (2.0, 0.5)[stage] + 0.001 * rows


def test_unlike_stages_end_up_with_one_window() -> None:
    house = run_eight(unlike)
    assert house.groups == 1 and house.steady == [8] * 40


def test_a_model_whose_rows_dominate_keeps_a_window_for_each_group() -> None:
    house = run_eight(lambda stage, rows: 0.01 + 0.5 * rows)
    assert house.groups == 2 and house.steady == [4] * 40


@pytest.mark.parametrize("policy", [{"groups": 2}, {"groups": 1}, {"rows": "prefix"}])
def test_a_number_of_groups_that_was_asked_for_stays(policy: dict[str, object]) -> None:
    assert set(run_eight(unlike, **policy).steady) == {8 if policy == {"groups": 1} else 4}


def test_engines_that_tell_no_times_keep_their_groups() -> None:
    house = House(SlotPolicy(slots=4, groups=0), num_stages=2)
    for number in range(4):
        house.ask(f"r{number}", (number, 1, 2), max_tokens=40)
    while not house.ended:
        house.land()
    assert decode_windows(house)[-14:-4] == [2] * 10


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_right_while_the_way_changes(seed: int) -> None:
    """Costs that jump about, requests that come, go on and leave: every answer is that of a cold run, the books balance."""
    rng = random.Random(seed)
    house = Timed(lambda stage, rows: rng.choice((1.0, 0.1 * rows)), SlotPolicy(slots=6, groups=0), num_stages=3, num_pages=300)
    for number in range(60):
        house.ask(f"r{number}", tuple(rng.randrange(40) for _ in range(rng.randrange(1, 20))), max_tokens=rng.randrange(1, 60))
        for _ in range(rng.randrange(25)):
            if house.engine.windows:
                house.land()
        if number % 7 == 6:
            house.cancel(f"r{number}")
    house.run()
    assert house.machine.scheduler.grouping.changes > 1
    for name in house.requests:
        if not house.was_cancelled(name):
            house.check(name)


def test_only_a_window_that_was_alone_from_end_to_end_tells_what_lies_between_stages() -> None:
    house = Timed(unlike, SlotPolicy(slots=4, groups=0), num_stages=2)
    trips: list[float | None] = []

    class Watched(StageTimes):
        def observe(self, rows: int, stages: Sequence[float], trip: float | None) -> None:
            trips.append(trip)

    house.machine.scheduler.grouping.times = Watched()
    house.ask("one", (1, 2, 3), max_tokens=40)
    house.land()
    house.land()
    assert trips == [pytest.approx(2.502)], "the prompt's window had left before this one was sent"
    house.ask("two", (4, 5, 6), max_tokens=20)
    house.land()
    assert trips[1] is None, "a chunk was sent behind it"
    house.land()
    house.land()
    assert trips[2] is None, "it was sent while the chunk was on its way"
    while "two" not in house.ended:
        house.land()
    trips.clear()
    house.ask("three", (7, 8, 9), max_tokens=1)
    while "three" not in house.ended or len(trips) < 2:
        house.land()
    assert trips == [None, None], "the second was sent behind the chunk, though nothing came after it"
