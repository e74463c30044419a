"""Rows on their way between devices: they arrive whole, nobody waits on the host, and no direct copy is believed untried."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from strata.devices.base import Buffer
from strata.devices.emulated import EmulatedDevice, EmulatedStream
from strata.engine.device_stage import connect
from strata.engine.hop import PLACES, Hop, fault_of
from tests.engine.running import TINY, pages_for, random_ids
from tests.kernels.test_engine import DeviceStages

pytestmark = pytest.mark.cxx
SHAPE = (6, 8)


class Ends:
    """Two devices, a stream of each, and the hop between them."""

    def __init__(self, direct: bool = False) -> None:
        self.devices = [EmulatedDevice(), EmulatedDevice()]
        self.streams = [device.stream() for device in self.devices]
        self.hidden = [device.allocate(SHAPE, np.float32) for device in self.devices]
        self.hop = Hop(*self.devices, SHAPE, direct)

    def send(self, rows: np.ndarray) -> Any:
        self.devices[0].upload(self.hidden[0].rows(0, len(rows)), rows, self.streams[0])
        parcel = self.hop.begin(self.streams[0])
        self.hop.send(parcel, self.hidden[0].rows(0, len(rows)), self.streams[0])
        return parcel

    def receive(self, parcel: Any) -> np.ndarray:
        got = np.zeros((parcel.count, SHAPE[1]), np.float32)
        self.streams[1].wait(parcel.place.filled)
        self.hop.receive(parcel, self.hidden[1], self.streams[1])
        self.devices[1].download(got, self.hidden[1].rows(0, parcel.count), self.streams[1])
        assert not got.any() and not parcel.place.filled.query(), "nothing has been waited for yet"
        self.streams[1].synchronize()
        return got


@pytest.mark.parametrize("direct", [False, True])
def test_rows_of_many_windows_arrive_and_places_come_back(direct: bool) -> None:
    ends, rng = Ends(direct), np.random.default_rng(1)
    windows = [rng.standard_normal((1 + number % SHAPE[0], SHAPE[1])).astype(np.float32) for number in range(2 * PLACES)]
    parcels = [ends.send(rows) for rows in windows]
    for rows, parcel in zip(windows, parcels):
        np.testing.assert_array_equal(ends.receive(parcel), rows)
        assert parcel.seconds() > 0
    assert len(ends.hop.free) == 0
    del parcel, parcels
    assert len(ends.hop.free) == 2 * PLACES
    np.testing.assert_array_equal(ends.receive(ends.send(windows[3])), windows[3])
    assert len(ends.hop.free) == 2 * PLACES, "no more were made"


class Careless(EmulatedDevice):
    """A device whose copies to others lose a bit of their last byte."""

    def copy(self, target: Buffer, source: Buffer, stream: EmulatedStream) -> None:
        super().copy(target, source, stream)
        flipped = target.view((target.nbytes,), np.uint8).view((1,), offset=target.nbytes - 1)
        last, host = source.view((source.nbytes,), np.uint8).view((1,), offset=source.nbytes - 1), np.zeros(1, np.uint8)
        self.download(host, last, stream)
        stream.enqueue(lambda: host.__ixor__(4) is None)
        self.upload(flipped, host, stream)


class Distant(EmulatedDevice):
    def reach(self, peer: object) -> bool:
        return False


def test_a_direct_way_is_proven_byte_for_byte() -> None:
    assert fault_of(EmulatedDevice(), EmulatedDevice(), 1000) == ""
    assert fault_of(Careless(), EmulatedDevice(), 1000) == "1 of 1000 bytes of a test arrived changed"
    assert fault_of(Distant(), EmulatedDevice(), 1000) == "these devices do not reach each other's memory"


@pytest.mark.parametrize("kind, wanted", [(EmulatedDevice, True), (Careless, False), (Distant, False)])
def test_stages_take_the_direct_way_only_where_it_works(caplog: pytest.LogCaptureFixture, kind: type[EmulatedDevice], wanted: bool) -> None:
    tokens, caplog.handler.level = random_ids(9, 3), logging.INFO
    with caplog.at_level(logging.INFO), DeviceStages(TINY) as whole, DeviceStages(TINY, splits=(2,)) as split:
        split.models[0].ops.device.__class__ = kind  # what is there of it already stays
        connect(split.models, peer_copy=True)
        assert isinstance(split.models[0].outbound.free[0].memory, Buffer) == wanted
        np.testing.assert_array_equal(split.read(tokens, pages_for(1)), whole.read(tokens, pages_for(1)))
    said = [(record.levelno, record.getMessage()) for record in caplog.records if "rows go from" in record.getMessage()]
    assert said[0] == (logging.INFO, "rows go from stage 0 to stage 1 by way of host memory (peer_copy is off)")
    assert said[1][0] == (logging.INFO if wanted else logging.WARNING)
    assert said[1][1].startswith("rows go from stage 0 to stage 1 " + ("directly" if wanted else "by way of host memory ("))
