"""How many drafts are worth checking: a choice for the slots of a window together, from measured acceptance and measured costs.

Theory. A source does not always have a draft to give; q_i is the share of windows in which it gives an i-th, and P_i the chance that this
and all before it are then the model's own picks. It gives many where it is sure, so P_i is more than a product of what each draft is
worth. A slot's window for which k drafts are wanted brings 1 + q_1 * P_1 + ... + q_k * P_k tokens in expectation. Every draft is a row, and
a draft of the model's head (``mtp``) is a step of the head too; one step serves all slots. For the slots s of a window, with k_s drafts
wanted by each and K = the largest k_s of the head,

    T = sum_s (1 + sum_{i<=k_s} q_si * P_si) / (t(R) + d(K))      tokens/s,      R = sum_s (1 + sum_{i<=k_s} q_si)      rows

t(R) is the time until a window of R rows is back: a curve through what grouping.py measures (curve.py), and with several windows in a
pipeline the longer of its two terms. d(K) is what the head takes where K drafts are wanted of it, of which it makes those that are
worth it (draft_trust.py). Nothing else is known of a lookup in the slot's own text, which costs rows alone. For a given K a row costs the
same whoever uses it, so rows go to drafts in the order of P: one walk through a sorted list for each K finds the maximum, unless speed
falls by a tenth on the way. The maximum is flat, so what drafts cost is taken for less: about as fast, with more tokens in a window.
There are drafts at all only where they promise a gain, more of it for many slots: the best of many noisy promises is too good, and of
several slots those that accept much end sooner, so that the others share a window with fewer.

A slot's own counts are few, so p and q start from the whole server's, as if so many windows had been seen. The server's for a depth
nobody has tried start from the depth before: acceptance hardly falls with depth.

Nothing here keeps state, reads a clock or draws at random, and no choice touches a token: a draft is kept only where it equals the pick.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from strata.messages import NO_DRAFTS, DraftLimits, DraftSource
from strata.slots.curve import Curve

WEIGHT = 16.0
"""Windows that the prior of a chance counts for."""
FIRST_GUESS = {"mtp": (1.0, 0.5), "lookup": (0.2, 0.5)}
"""Before anything was seen: the share of windows in which a source gives a draft, and the chance that it is right."""
GAIN, UNLIKE = 0.0125, 8
"""By how much drafts must promise to be faster than none, for each slot of the window up to so many."""
FLAT = 0.6
"""How many drafts there are is decided as if they cost this much of what they do, unless they then promise too little."""
FEW = 4
"""Of more steps of the head than this only every so manieth number is looked at."""
NEAR = 0.9
"""Behind so much of the fastest, no more drafts are looked at: rows that cost nothing may follow one that costs a lot."""
LEAST = 0.03
"""Of a draft that is given and accepted; from one less likely on nobody wants more."""


class Tally:
    """How the drafts of one source fared: windows by how many drafts were wanted, came, were checked, were right."""

    __slots__ = ("asked", "given", "checked", "right")

    def __init__(self, depth: int) -> None:
        self.asked = [0.0] * (depth + 1)
        self.given = [0.0] * (depth + 1)
        self.checked = [0.0] * (depth + 1)
        self.right = [0.0] * (depth + 1)

    def add(self, asked: int, given: int, checked: int, accepted: int) -> None:
        """One window: up to ``asked`` drafts wanted, ``given`` came, ``checked`` of them found a row, ``accepted`` were right."""
        self.asked[asked] += 1
        self.given[given] += 1
        self.checked[checked] += 1
        self.right[accepted] += 1

    def by_depth(self) -> Iterator[tuple[float, float, float, float]]:
        """Of the 1st, 2nd, ... draft: windows that wanted it, got it, checked it, found it right and all before it."""
        columns = self.asked, self.given, self.checked, self.right
        rest = [sum(column) for column in columns]
        for depth in range(1, len(self.asked)):
            rest = [left - column[depth - 1] for left, column in zip(rest, columns)]
            yield rest[0], rest[1], rest[2], rest[3]

    def fade(self, factor: float) -> None:
        """Old windows count less."""
        for values in (self.asked, self.given, self.checked, self.right):
            values[:] = [value * factor for value in values]


class Chance(NamedTuple):
    """Of a draft at some depth: ``share`` of windows that have one, and how likely it and all before it are then right."""

    share: float
    right: float


def server_chances(tally: Tally, guess: tuple[float, float]) -> list[Chance]:
    """By depth; what was not seen continues the depth before. Deeper drafts cannot be there more often."""
    chances: list[Chance] = []
    last, kept = Chance(guess[0], 1.0), guess[1]
    for asked, given, checked, right in tally.by_depth():
        share = (given + WEIGHT * last.share) / (asked + WEIGHT)
        both = (right + WEIGHT * last.right * kept) / (checked + WEIGHT)
        kept = min(both / last.right, 1.0) if last.right else 0.0
        last = Chance(min(share, last.share) if chances else share, both)
        chances.append(last)
    return chances


def slot_chances(tally: Tally, server: Sequence[Chance], depth: int) -> list[Chance]:
    """Up to ``depth`` drafts of one slot, the first at least."""
    chances: list[Chance] = []
    for (asked, given, checked, right), prior in zip(tally.by_depth(), server[:depth]):
        both = (right + WEIGHT * prior.right) / (checked + WEIGHT)
        share = (given + WEIGHT * prior.share) / (asked + WEIGHT)
        if share * both < LEAST and chances:
            break
        chances.append(Chance(share, both))
    return chances


@dataclass(frozen=True, slots=True)
class Prospect:
    """What one slot's drafts promise, by depth; a source that is not there, or has no room, has an empty list."""

    mtp: Sequence[Chance] = ()
    lookup: Sequence[Chance] = ()

    @property
    def unserved(self) -> float:
        """Share of windows in which the lookup finds nothing, so that the head is asked."""
        return 1 - self.lookup[0].share if self.lookup else 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds. ``limits``: of each limit on a window's time, its curve over the rows and how often the head's time is in it.
    ``steps``: what the head takes where 0, 1, 2, ... steps are wanted; it may stop before."""

    limits: tuple[tuple[Curve, float], ...]
    steps: tuple[float, ...]

    def at(self, rows: float, head: float) -> float:
        return max([curve.at(rows) + times * head for curve, times in self.limits])


def window_cost(stages: Sequence[Curve], windows: int, between: float, steps: Sequence[float]) -> Cost:
    """``stages``: the time of each, for as many rows. The head is on the last. ``windows``: that share the pipeline."""
    trip = Curve(tuple(sum(seconds) + between for seconds in zip(*(stage.seconds for stage in stages)))), 1.0
    if windows == 1:
        return Cost((trip,), tuple(steps))
    busiest = [(Curve(tuple(windows * seconds for seconds in stage.seconds)), 0.0) for stage in stages]
    busiest[-1] = busiest[-1][0], float(windows)
    return Cost((trip, *busiest), tuple(steps))


def head_seconds(slots: Sequence[Prospect], cost: Cost) -> list[float]:
    """By the number of steps wanted, what they take: nothing where every slot has a lookup."""
    idle = 1.0
    for slot in slots:
        idle *= 1 - slot.unserved
    return [(1 - idle) * seconds for seconds in cost.steps]


class Offer(NamedTuple):
    """A draft that a slot could have. Offers sort by ``rank``, minus the chance that it is right, but none before what it builds on.
    ``share``: of windows that have it, so of a row; ``gain``: of a token."""

    rank: float
    place: int
    source: DraftSource
    depth: int
    share: float
    gain: float


def offers_of(place: int, source: DraftSource, chances: Sequence[Chance], times: float) -> Iterator[Offer]:
    """``times``: the share of windows in which the source is asked."""
    rank = -1.0
    for depth, one in enumerate(chances, 1):
        rank = max(rank, -one.right)
        yield Offer(rank, place, source, depth, times * one.share, times * one.share * one.right)


class Choice(NamedTuple):
    """Some offers. ``speed``: tokens/s that they promise; ``worth``: the same, if they cost a part of what they do."""

    offers: Sequence[Offer] = ()
    speed: float = 0.0
    worth: float = 0.0


def choose(slots: Sequence[Prospect], cost: Cost, is_tried: bool = True) -> list[DraftLimits]:
    """Drafts wanted by each slot, so that all of them together get the most tokens per second; see the head of this file.

    ``is_tried``: whether the chances were seen. Those that are guessed need not promise more for many slots, or nobody would try.
    """
    offers: list[Offer] = []
    for place, slot in enumerate(slots):
        offers += offers_of(place, "lookup", slot.lookup, 1.0)
        offers += offers_of(place, "mtp", slot.mtp, slot.unserved)
    offers.sort()
    heads = head_seconds(slots, cost)
    needed = len(slots) / cost.at(len(slots), 0.0) * (1 + GAIN * (min(len(slots), UNLIKE) if is_tried else 1))
    choices = (best(offers, len(slots), cost, heads, paid) for paid in (FLAT, 1.0))
    choice = next((choice for choice in choices if choice.speed >= needed), None)
    if choice is None:
        return [NO_DRAFTS] * len(slots)
    mtp, lookup = [0] * len(slots), [0] * len(slots)
    for offer in choice.offers:
        wanted = mtp if offer.source == "mtp" else lookup
        wanted[offer.place] = max(wanted[offer.place], offer.depth)
    return [DraftLimits(*both) for both in zip(mtp, lookup)]


def best(offers: Sequence[Offer], slots: int, cost: Cost, heads: Sequence[float], paid: float) -> Choice:
    """The first of ``offers`` (sorted), and the first steps of the head (``heads``: seconds by their number), that are worth most if
    they cost ``paid`` of what they do."""
    alone, choice = cost.at(slots, 0.0), Choice()
    for steps, head in enumerate(heads):
        if steps > FEW and steps % FEW and steps < len(heads) - 1:
            continue
        offered = [offer for offer in offers if offer.source == "lookup" or offer.depth <= steps]
        rows = tokens = float(slots)
        last = 0.0
        for count, offer in enumerate(offered, 1):
            rows += offer.share
            tokens += offer.gain
            extra = cost.at(rows, head) - alone
            worth = tokens / (alone + paid * extra)
            if worth < NEAR * last:
                break
            last = max(last, worth)
            if worth > choice.worth:
                choice = Choice(offered[:count], tokens / (alone + extra), worth)
    return choice


def share_rows(wanted: Sequence[int], rows: int, first: int) -> list[int]:
    """Fewer ``rows`` than are wanted in all: everybody gets up to the same number; what is then left goes round, from ``first`` on."""
    level = 0
    while sum(min(one, level + 1) for one in wanted) <= rows and level < max(wanted, default=0):
        level += 1
    shares = [min(one, level) for one in wanted]
    left = rows - sum(shares)
    for place in (*range(first, len(wanted)), *range(first)):
        if left > 0 and wanted[place] > level:
            shares[place] += 1
            left -= 1
    return shares
