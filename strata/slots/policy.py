"""Every choice of the slot machine, as pure functions of plain rows: who sits where, who leaves, who reads next.

Slot choice follows the rule that the original's users measured and asked for, in this order: the longest match; then
with pipelined groups the group with the fewest busy slots, inside it the lowest slot (the low-first switch), then a slot
that holds nothing, then the least recently used; with one group an empty slot, else the least recently used, or with expiry
the least recently used among those idle for that long, else the one that holds the shortest history.
Why low-first: a window of a pipelined group used to run every row up to its last active slot, so a hole below cost a row on every stage.
Why expiry: a side request of one line must not displace the longest conversation only because that one paused the longest.
Nothing here keeps state, reads a clock, or draws at random; ties go by the scan order, so equal inputs choose equally everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from strata.errors import SettingError


@dataclass(frozen=True, slots=True)
class SlotPolicy:
    """The settings the machine obeys. Seconds, tokens, bytes.

    ``groups`` 0: ``choose_groups``, and while running grouping.py. ``chunk`` 0: the engine's default. ``queue_timeout`` 0: no limit.
    ``expire_s`` 0: off.
    ``cache_bytes``: host memory for parked conversations; nothing is parked while less than ``host_floor`` bytes of host memory are free.
    """

    slots: int = 8
    groups: int = 1
    rows: Literal["compact", "prefix"] = "compact"
    chunk: int = 0
    decode_share: float = 0.5
    max_overtaken: int = 16
    queue_limit: int = 64
    queue_timeout: float = 0.0
    low_first: bool = True
    expire_s: float = 0.0
    shelf: bool = True
    shelf_limit: int = 512
    cache_bytes: int = 0
    host_floor: int = 2560 << 20

    def __post_init__(self) -> None:
        if self.slots < 1 or self.groups < 0 or (self.groups and self.slots % self.groups):
            raise SettingError(f"batch_groups={self.groups} must divide batch={self.slots} (both at least 1)")
        if self.rows not in ("compact", "prefix"):
            raise SettingError(f"rows={self.rows!r} must be compact or prefix")
        if not 0 <= self.decode_share or min(self.queue_limit, self.queue_timeout, self.expire_s, self.cache_bytes, self.chunk) < 0:
            raise SettingError("decode_share, queue and expiry limits, cache size and chunk must not be negative")


class Seat(NamedTuple):
    """One slot as ``pick_slot`` sees it. ``held``: tokens of history; ``used``: when a request last left; ``match``: tokens continued."""

    busy: bool
    held: int = 0
    used: float = 0.0
    match: int = 0


MIN_GROUP_MATCH = 512
"""With pipelined groups, a shorter match is not worth unbalancing the groups."""


def scan_order(num_slots: int, groups: int) -> list[int]:
    """The first slot of every group, then the second of every group, and so on: the order in which ties are resolved."""
    size = num_slots // groups
    return [group * size + place for place in range(size) for group in range(groups)]


def pick_slot(seats: Sequence[Seat], groups: int, *, now: float, low_first: bool = True, expire_s: float = 0.0) -> int | None:
    """The slot for the next request, or None while all are busy."""
    free = [number for number in scan_order(len(seats), groups) if not seats[number].busy]
    if not free:
        return None
    best = max(free, key=lambda number: seats[number].match)
    if seats[best].match >= (MIN_GROUP_MATCH if groups > 1 else 1):
        return best
    if groups > 1:
        return _pick_pipelined(seats, free, groups, low_first)
    empty = [number for number in free if not seats[number].held]
    if empty:
        return min(empty, key=lambda number: seats[number].used)
    # Without the third key: among seats, histories of one length are a tie.
    return min(free, key=lambda number: eviction_key(seats[number].held, seats[number].used, now, expire_s)[:2])


def _pick_pipelined(seats: Sequence[Seat], free: Sequence[int], groups: int, low_first: bool) -> int:
    size = len(seats) // groups
    busy = [sum(seat.busy for seat in seats[group * size:(group + 1) * size]) for group in range(groups)]

    def key(number: int) -> tuple[int, int, bool, float]:
        seat = seats[number]
        return busy[number // size], number % size if low_first else 0, seat.held > 0, seat.used

    return min(free, key=key)


def eviction_key(held: int, used: float, now: float, expire_s: float) -> tuple[int, float, float]:
    """Smallest goes first: expired ones by last use; else the shortest; with expiry off simply the least recently used."""
    if expire_s <= 0:
        return 0, used, 0.0
    if now - used >= expire_s:
        return 0, used, 0.0
    return 1, held, used


def containment_match(held: Sequence[int], prompt: Sequence[int]) -> int:
    """The original's match: all of ``held``, where the prompt begins with it and goes on; else 0."""
    length = len(held)
    return length if 0 < length < len(prompt) and list(prompt[:length]) == list(held) else 0


def choose_groups(slots: int, stages: int, asked: int) -> int:
    """``asked`` if given (1 or more), else the largest count that divides the slots and is not above the stages."""
    return asked or next(groups for groups in range(min(slots, stages), 0, -1) if slots % groups == 0)


def chunk_end(start: int, total: int, chunk: int, grid: int) -> int:
    """Where a chunk that starts at ``start`` ends: at most ``chunk`` tokens on, at a multiple of the grid or at the text's end."""
    if start + chunk >= total:
        return total
    end = (start + chunk) // grid * grid
    return end if end > start else min(total, (start // grid + 1) * grid)


class Reader(NamedTuple):
    """A slot that is reading. ``order``: arrival; ``overtaken``: chunks that later arrivals read while it waited for its own."""

    remaining: int
    order: int
    overtaken: int


def pick_reader(readers: Sequence[Reader], max_overtaken: int) -> int:
    """Index of the prompt whose chunk is read next: whoever was overtaken often enough, else the shortest rest, oldest first."""
    patient = [index for index, reader in enumerate(readers) if reader.overtaken >= max_overtaken]
    if patient:
        return min(patient, key=lambda index: readers[index].order)
    return min(range(len(readers)), key=lambda index: readers[index][:2])


def retry_after(waiting: int, slots: int, mean_seconds: float) -> int:
    """Seconds after which a refused client may find a place: the queue's length times the mean service time, 1 to 60."""
    return max(1, min(60, math.ceil((waiting + 1) * mean_seconds / slots)))
