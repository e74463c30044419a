"""Hidden rows from one stage's device to the next one's, with no host that waits for them.

Theory. The sender's stream copies a window's rows to a *place* and records an event; the receiver's stream waits for that event and copies
them on. The stages' threads hand over only a parcel: which place, how many rows. A place is pinned host memory, which every device
copies to and from at full speed, or, where asked for and proven, memory of the receiver's device. Why not always the latter: many
cards do not reach each other, and some that say so deliver wrong bytes; ``fault_of`` sends patterns over before anybody relies on it.

Rules. A place belongs to its window until the window has left the last stage, so a sender never waits for one to be free; there are as many
as windows were in flight at once. A parcel that is dropped gives its place back, however its window ended: what the next one writes there
comes after it in the sender's stream, and the receiver's stream waits for that window's own event.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import cast

import numpy as np

from strata.devices.base import Buffer, Device, Event, HostArray, Stream

PLACES = 4
"""Of a hop from the start; more are made when more windows are in flight."""


@dataclass(frozen=True, slots=True)
class Place:
    """``memory`` float32 [rows, width]. ``begun``, ``filled``: timed events of the sender around its work on the window."""

    memory: HostArray | Buffer
    begun: Event
    filled: Event


class Parcel:
    """``count`` rows of a window at a place of ``hop``."""

    def __init__(self, hop: Hop, place: Place) -> None:
        self.hop, self.place, self.count = hop, place, 0

    def __del__(self) -> None:
        self.hop.free.append(self.place)

    def seconds(self) -> float:
        """What the sender's device took, its copy included, when the window has left the last stage."""
        return self.hop.source.seconds_between(self.place.begun, self.place.filled)


class Hop:
    """From ``source`` to ``target``, for windows of up to ``shape`` = (rows, width). ``direct``: by a copy between the devices."""

    def __init__(self, source: Device, target: Device, shape: tuple[int, int], direct: bool = False) -> None:
        self.source, self._target, self._shape, self._direct = source, target, shape, direct
        self.free = deque(self._make() for _ in range(PLACES))

    def _make(self) -> Place:
        memory = self._target.allocate(self._shape, np.float32) if self._direct else self.source.pinned(self._shape, np.float32)
        return Place(memory, self.source.timed_event(), self.source.timed_event())

    def begin(self, stream: Stream) -> Parcel:
        """A parcel for the window that the sender's ``stream`` begins now."""
        try:
            place = self.free.popleft()
        except IndexError:
            place = self._make()
        stream.record(place.begun)
        return Parcel(self, place)

    def send(self, parcel: Parcel, rows: Buffer, stream: Stream) -> None:
        """Enqueues the copy of ``rows`` float32 [count, width], on the sender's stream."""
        parcel.count = rows.shape[0]
        memory = parcel.place.memory
        if self._direct:
            self.source.copy(cast(Buffer, memory).rows(0, parcel.count), rows, stream)
        else:
            self.source.download(cast(HostArray, memory)[: parcel.count], rows, stream)
        stream.record(parcel.place.filled)

    def receive(self, parcel: Parcel, hidden: Buffer, stream: Stream) -> None:
        """Enqueues the copy to the first rows of ``hidden``, on a stream of the receiver that waits for the sender already."""
        rows, memory = hidden.rows(0, parcel.count), parcel.place.memory
        if self._direct:
            self._target.copy(rows, cast(Buffer, memory).rows(0, parcel.count), stream)
        else:
            self._target.upload(rows, cast(HostArray, memory)[: parcel.count], stream)


def fault_of(source: Device, target: Device, nbytes: int) -> str:
    """Why ``nbytes`` cannot be copied directly from ``source`` to ``target``; "" when patterns have arrived byte for byte."""
    if not source.reach(target):
        return "these devices do not reach each other's memory"
    stream, back = source.stream(), target.stream()
    sent, arrived = source.allocate((nbytes,), np.uint8), target.allocate((nbytes,), np.uint8)
    got = np.empty(nbytes, np.uint8)
    for seed in range(2):
        pattern = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        source.upload(sent, pattern, stream)
        source.copy(arrived, sent, stream)
        stream.synchronize()
        target.download(got, arrived, back)
        back.synchronize()
        wrong = int(np.count_nonzero(got != pattern))
        if wrong:
            return f"{wrong} of {nbytes} bytes of a test arrived changed"
    return ""
