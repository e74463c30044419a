"""Reports of an engine that cannot be true: refused before anything has changed, so that the right one can still come."""

from __future__ import annotations

import pytest

from strata.messages import SegmentResult, WindowDone
from strata.slots.events import IllegalEvent
from tests.slots.house import House


def test_windows_of_one_request_that_report_in_another_order() -> None:
    house = House(num_stages=2)
    house.ask("a", tuple(range(40)))
    before = house.machine.view(0.0)
    with pytest.raises(IllegalEvent, match="in the order"):
        house.send(WindowDone(house.engine.windows[1].id, (SegmentResult(),)))
    assert house.machine.view(0.0) == before
    house.run()
    house.check("a")


@pytest.mark.parametrize("result", [SegmentResult(picks=(1,)), SegmentResult(accepted=1)])
def test_a_part_of_a_prompt_that_picks_or_accepts(result: SegmentResult) -> None:
    house = House()
    house.ask("a", tuple(range(40)))
    before = house.machine.view(0.0)
    with pytest.raises(IllegalEvent, match="do not fit"):
        house.send(WindowDone(house.engine.windows[0].id, (result,)))
    assert house.machine.view(0.0) == before
    house.run()
    house.check("a")


@pytest.mark.parametrize("result", [SegmentResult(), SegmentResult(picks=(1, 2)), SegmentResult(picks=(1, 2), accepted=1)])
def test_a_row_that_picks_more_or_less_than_it_was_asked(result: SegmentResult) -> None:
    house = House()
    house.ask("a", (1, 2, 3))
    house.land()
    before = house.machine.view(0.0)
    with pytest.raises(IllegalEvent, match="do not fit"):
        house.send(WindowDone(house.engine.windows[0].id, (result,)))
    assert house.machine.view(0.0) == before
    house.run()
    house.check("a")
