"""What a window of so many rows takes, from a few measured numbers of rows.

Theory. Where the weights' way through memory dominates, time is nearly a line in the rows, and the line through all that was measured is
the least noisy guess. But kernels take rows in pairs, fours or tiles: on processors a third row costs a tenth of a window and a fourth
nothing. So each measured number of rows keeps its own time as far as it was measured often, drawn to the line where it was not; no number
of rows is taken to be quicker than fewer; what lies between two of them is read off between them, and behind the last it goes on as the
line.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

PRIOR = 8.0
"""The line counts for as much as so many windows."""


class Curve(NamedTuple):
    """``seconds`` for 0, 1, 2, ... rows, two at least; straight between whole rows, and on as between the last two."""

    seconds: tuple[float, ...]

    def at(self, rows: float) -> float:
        whole = min(int(rows), len(self.seconds) - 2)
        first, last = self.seconds[whole], self.seconds[whole + 1]
        return first + (last - first) * (rows - whole)


def straight(fixed: float, per_row: float) -> Curve:
    return Curve((fixed, fixed + per_row))


def line(rows: Sequence[int], seconds: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """The least-squares line through (rows, seconds): at no rows, and per row. It does not fall with the rows, nor begin below zero."""
    total = sum(weights)
    mean_rows = sum(map(mul, weights, rows)) / total
    mean = sum(map(mul, weights, seconds)) / total
    spread = sum(weight * (number - mean_rows) ** 2 for weight, number in zip(weights, rows))
    slope = sum(weight * (number - mean_rows) * (value - mean) for weight, number, value in zip(weights, rows, seconds)) / spread
    slope = min(max(slope, 0.0), mean / mean_rows)
    return mean - slope * mean_rows, slope


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values that never fall (weighted least squares, by pooling neighbours: Ayer et al. 1955)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights):
        count = 1
        while pools and pools[-1][0] >= value:
            before, heavy, many = pools.pop()
            value, weight, count = (before * heavy + value * weight) / (heavy + weight), heavy + weight, many + count
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]


def fitted(rows: Sequence[int], seconds: Sequence[float], weights: Sequence[float]) -> Curve:
    """``seconds`` that were measured for so many ``rows`` (rising, two at least), in ``weights`` windows each."""
    fixed, per_row = line(rows, seconds, weights)
    drawn = [
        (weight * value + PRIOR * (fixed + per_row * number)) / (weight + PRIOR)
        for number, value, weight in zip(rows, seconds, weights)
    ]
    knots = rising(drawn, [weight + PRIOR for weight in weights])
    found, at = [max(0.0, knots[0] - per_row * rows[0])], 0
    for number, knot in zip(rows, knots):
        start, first = at, found[-1]
        found += [first + (knot - first) * (row - start) / (number - start) for row in range(start + 1, number + 1)]
        at = number
    return Curve((*found, found[-1] + per_row))
