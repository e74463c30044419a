"""One window for all decoding slots, or one for each group: decided from measured stage times, as the set of active slots changes.

Theory. Stage s needs t_s(r) = a_s + b_s * r seconds for a window of r rows: a part for reading the weights and a part for each row. With
S stages, R rows in G windows of r = R / G rows, and x seconds between the stages and around the window,

    T(G) = w * R / max( G * max_s t_s(r),  sum_s t_s(r) + x )       tokens/s, w accepted tokens per row and window

The first term is the busiest stage, which every window has to pass; the second is one window's round trip, which binds while a stage
has to wait for windows to come back. With balanced stages and x small T(S) / T(1) = (a + b * R) / (a + b * R / S): 1 when weights
dominate, S when rows do. So groups pay where the time grows with the rows, and cost where stages are unlike or hinder each other.
Unequal groups: G * t_s(r) becomes the sum of their t_s, and the round trip that of the largest. All ways run the same rows in one
turn, so the shortest turn wins. Where slots check drafts they have more than one row each, and every window also pays for drafting, on
the last stage; both as they were on average, so w is the same for all ways.

Rules. Times are averages of what was measured in use at that number of rows, so stages that hinder each other (memory bandwidth, a
shared host) are measured like that. The first windows of a size do not count: they compile, capture and fault pages in. Other sizes
are read off a straight line through the measured ones; where too few are known, the way that was not measured is tried. What was not
measured for long is forgotten, as contexts have grown since. A change must promise a gain, or noise would make it flap.
Nothing here touches what is computed: tokens do not depend on groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from strata.slots.curve import Curve, fitted, line

WARM_UP = 2
"""Windows of a number of rows that are run before any is measured."""
SAMPLES = 4
"""Measured windows after which a number of rows counts as known."""
MEMORY = 48
"""An average follows the last so many windows."""
OUTLIER = 2.0
"""A window counts at most as so many times the average."""
FORGET = 4096
"""Windows after which a number of rows that did not come again is forgotten."""
GAIN = 1.03
"""How much shorter a turn must be to leave the present way."""
AGAIN = 32
"""Windows after which an unchanged set of active slots is looked at again."""


@dataclass(slots=True)
class _Measured:
    """Windows of one number of rows: how many, the last one's number, mean seconds of each stage, mean seconds not spent in a stage."""

    count: int = 0
    last: int = 0
    stages: tuple[float, ...] = ()
    between: float = 0.0


@dataclass(slots=True)
class StageTimes:
    """Seconds of a decode window on each stage by its number of rows."""

    known: dict[int, _Measured] = field(default_factory=dict)
    windows: int = 0

    def observe(self, rows: int, stages: Sequence[float], trip: float | None) -> None:
        """A window of ``rows`` rows took ``stages`` seconds on each stage, and ``trip`` in all; None where others were in its way."""
        self.windows += 1
        entry = self.known.get(rows)
        if entry is None or self.windows - entry.last > FORGET:
            entry = self.known[rows] = _Measured()
        entry.count, entry.last = entry.count + 1, self.windows
        samples = entry.count - WARM_UP
        if samples < 1:
            return
        weight = 1 / min(samples, MEMORY)
        before = entry.stages or stages
        # One window that was held up by something else tells nothing of the others.
        entry.stages = tuple(old + weight * (min(new, OUTLIER * old) - old) for old, new in zip(before, stages, strict=True))
        if trip is not None:
            entry.between += weight * (max(0.0, trip - sum(stages)) - entry.between)

    def seconds(self, rows: int) -> tuple[float, ...] | None:
        """t_s(rows) of every stage, measured or from the line; None where too little is known."""
        known = self.measured()
        if rows in known:
            return known[rows]
        lines = self.lines()
        return tuple(fixed + per_row * rows for fixed, per_row in lines) if lines is not None else None

    def measured(self) -> dict[int, tuple[float, ...]]:
        """t_s of the numbers of rows that are known."""
        return {
            number: entry.stages for number, entry in self.known.items()
            if entry.count >= WARM_UP + SAMPLES and self.windows - entry.last <= FORGET
        }

    def lines(self) -> list[tuple[float, float]] | None:
        """a_s and b_s of every stage; None where too little is known."""
        samples = self._samples()
        return None if samples is None else [line(*each) for each in samples]

    def curves(self) -> list[Curve] | None:
        """t_s of every stage for any number of rows; None where too little is known."""
        samples = self._samples()
        return None if samples is None else [fitted(*each) for each in samples]

    def _samples(self) -> list[tuple[list[int], tuple[float, ...], list[int]]] | None:
        """Of every stage the known numbers of rows, their seconds and how much these count; None for fewer than two numbers."""
        known = self.measured()
        if len(known) < 2:
            return None
        rows = sorted(known)
        weights = [min(self.known[number].count, MEMORY) for number in rows]
        return [(rows, seconds, weights) for seconds in zip(*(known[number] for number in rows))]

    @property
    def between(self) -> float:
        """x: the mean over what was measured."""
        values = [entry.between for entry in self.known.values() if entry.between]
        return sum(values) / len(values) if values else 0.0


def turn(windows: Sequence[Sequence[float]], between: float) -> float:
    """Seconds until each of some windows has passed all stages once. ``windows``: of each, the seconds on every stage."""
    busiest: float = max(sum(stage) for stage in zip(*windows))
    longest: float = max(sum(window) for window in windows)
    return max(busiest, longest + between)


@dataclass(slots=True)
class Grouping:
    """The decision for one engine. ``is_joined``: all decoding slots share one window."""

    times: StageTimes = field(default_factory=StageTimes)
    is_joined: bool = False
    changes: int = 0
    _slots: tuple[int, ...] = ()
    _looked_at: int = -AGAIN

    def choose(self, slots: tuple[int, ...], rows: float = 1.0, drafting: float = 0.0) -> bool:
        """Whether groups in which ``slots`` slots decode share one window from now on.

        ``rows``: of a slot in a window. ``drafting``: seconds that a window drafts, on the last stage.
        """
        if slots != self._slots or self.times.windows - self._looked_at >= AGAIN:
            self._slots, self._looked_at = slots, self.times.windows
            joined = self._decide([number for number in slots if number], rows, drafting)
            self.changes += joined != self.is_joined
            self.is_joined = joined
        return self.is_joined

    def _decide(self, groups: Sequence[int], rows: float, drafting: float) -> bool:
        if len(groups) < 2:
            return self.is_joined  # one window either way
        apart = [self.times.seconds(round(number * rows)) for number in groups]
        together = self.times.seconds(round(sum(groups) * rows))
        if None in apart:
            return False
        if together is None:
            return True
        split = turn([(*window[:-1], window[-1] + drafting) for window in apart if window is not None], self.times.between)
        joined = turn([(*together[:-1], together[-1] + drafting)], self.times.between)
        return joined <= split * GAIN if self.is_joined else joined * GAIN < split
