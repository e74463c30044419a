"""Seconds by rows from a few measured ones: the line, the nearest that never falls, and how much each measurement counts."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.slots.curve import Curve, fitted, line, rising, straight

weighted = st.tuples(st.integers(1, 32), st.floats(0.001, 10), st.integers(1, 9))


@given(st.lists(weighted, min_size=2, max_size=6, unique_by=lambda point: point[0]))
def test_a_line_rises_and_begins_above_zero(points: list[tuple[int, float, int]]) -> None:
    rows, seconds, weights = zip(*points)
    fixed, per_row = line(rows, seconds, weights)
    assert fixed >= -1e-9 and per_row >= 0
    many = [point for point in points for _ in range(point[2])]
    xs, ys = [point[0] for point in many], [point[1] for point in many]
    assert line(xs, ys, [1] * len(many)) == pytest.approx((fixed, per_row)), "a weight is so many points"
    if fixed > 1e-6 and per_row > 1e-6:
        assert (per_row, fixed) == pytest.approx(tuple(numpy.polyfit(xs, ys, 1)), rel=1e-4, abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 9)), min_size=1, max_size=12))
def test_the_nearest_that_never_falls(points: list[tuple[float, int]]) -> None:
    """By its minimax formula: the largest, over where a run begins, of the smallest mean, over where it ends."""
    values, weights = zip(*points)

    def mean(start: int, stop: int) -> float:
        return float(numpy.average(values[start:stop], weights=weights[start:stop]))

    size = len(points)
    expected = [max(min(mean(start, stop) for stop in range(at + 1, size + 1)) for start in range(at + 1)) for at in range(size)]
    assert rising(values, weights) == pytest.approx(expected)


@given(st.lists(weighted, min_size=2, max_size=6, unique_by=lambda point: point[0]), st.lists(st.floats(0, 100), min_size=2))
def test_a_curve_never_falls(points: list[tuple[int, float, int]], rows: list[float]) -> None:
    rows_seen, seconds, weights = zip(*sorted(points))
    curve = fitted(rows_seen, seconds, weights)
    found = [curve.at(each) for each in sorted(rows)]
    assert found[0] >= -1e-9 and all(before <= after + 1e-6 * after for before, after in zip(found, found[1:]))


def test_what_was_measured_often_keeps_its_time() -> None:
    """Rows in pairs: the line rises with every row, and the curve with every other one, once it knows."""
    rows, seconds = (1, 2, 3, 4, 5, 6), (1.0, 1.0, 1.2, 1.2, 1.4, 1.4)
    sure, unsure = fitted(rows, seconds, [1e6] * 6), fitted(rows, seconds, [1e-6] * 6)
    fixed, per_row = line(rows, seconds, [1] * 6)
    assert [sure.at(each) for each in rows] == pytest.approx(seconds, abs=1e-4)
    assert [unsure.at(each) for each in rows] == pytest.approx([fixed + per_row * each for each in rows], abs=1e-4)
    assert fitted(rows, seconds, [8] * 6).at(1) == pytest.approx((1.0 + fixed + per_row) / 2), "the line is worth eight windows"
    assert sure.at(4.5) == pytest.approx(1.3, abs=1e-4), "between two it is read off between them"
    assert sure.at(38.5) == pytest.approx(1.4 + per_row * 32.5, abs=1e-3), "behind the last it goes on as the line"
    assert sure.at(0.5) == pytest.approx(1.0 - per_row / 2, abs=1e-3)
    gap = fitted((2, 6), (1.0, 3.0), [1e6] * 2)
    assert [gap.at(each) for each in (1, 2, 3, 4, 5, 6, 7, 9)] == pytest.approx([0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4.5], abs=1e-4)


def test_a_straight_one() -> None:
    assert [straight(0.5, 0.25).at(rows) for rows in (0, 1, 6)] == [0.5, 0.75, 2.0]
    assert Curve((1.0, 3.0, 4.0)).at(0.5) == 2.0
