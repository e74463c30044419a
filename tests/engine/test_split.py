"""Where the layers are cut: balanced against brute force, asked for and refused with what was meant."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.split import asked_split, balance, share_threads, spans
from strata.errors import SettingError


def stage_times(cut: list[range], costs: list[float], last: float, speeds: list[float]) -> list[float]:
    sums = [sum(costs[layer] for layer in span) for span in cut]
    sums[-1] += last
    return [total / speed for total, speed in zip(sums, speeds, strict=True)]


@given(st.data())
def test_no_other_cut_is_faster(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(costs)))
    speeds = data.draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    last = data.draw(st.integers(0, 40))
    room = data.draw(st.lists(st.integers(1, 100), min_size=stages, max_size=stages))

    def fits(stage: int, span: range) -> bool:
        return sum(costs[layer] for layer in span) <= room[stage]

    every = [spans(firsts, len(costs)) for firsts in combinations(range(1, len(costs)), stages - 1)]
    every = [cut for cut in every if all(fits(stage, span) for stage, span in enumerate(cut))]
    found = balance(costs, last, speeds, fits)
    assert (found is None) == (not every)
    if found is not None:
        assert found in every
        best = min(max(stage_times(cut, costs, last, speeds)) for cut in every)
        assert max(stage_times(found, costs, last, speeds)) == pytest.approx(best)


def test_what_is_known_by_hand() -> None:
    assert balance([1.0] * 48, 0.0, [1.0] * 4) == [range(0, 12), range(12, 24), range(24, 36), range(36, 48)]
    assert balance([1.0] * 7, 0.0, [1.0] * 3) == [range(0, 3), range(3, 5), range(5, 7)], "a rest goes to the earlier stages"
    assert balance([1.0] * 30, 8.0, [1.0, 1.0]) == [range(0, 19), range(19, 30)], "the output matrix is worth eight layers"
    assert balance([1.0] * 9, 0.0, [2.0, 1.0]) == [range(0, 6), range(6, 9)], "the faster device has more"
    assert balance([1.0] * 3, 0.0, [1.0] * 4) is None, "a stage would be empty"


def test_an_asked_split_is_kept() -> None:
    assert asked_split((12, 24, 36), 48, None) == [range(0, 12), range(12, 24), range(24, 36), range(36, 48)]
    assert asked_split((1,), 2, 2) == [range(0, 1), range(1, 2)]
    assert asked_split((16, 32), 48, None) == [range(0, 16), range(16, 32), range(32, 48)], "although the numbers add up to 48"


@pytest.mark.parametrize("firsts, devices, words", [
    ((12, 12, 12, 12), None, ["not rising", "layers per device, write 12,24,36"]),
    ((20, 10, 18), 3, ["not rising", "layers per device, write 20,30"]),
    ((24, 24), 2, ["layers per device, write 24"]),
    ((16, 32), 2, ["makes 3 stages, and 2 devices are named", "layers per device, write 16"]),
    ((24, 12), None, ["not rising; it is the first layer of each stage after the first"]),
    ((12, 12), None, ["not rising"]),
    ((0, 24), None, ["names layer 0", "layers are 0 to 47", "Leave out the 0: 24"]),
    ((0,), None, ["names layer 0", "is to hold no layers is left out"]),
    ((24, 48), 3, ["names layer 48", "is to hold no layers is left out"]),
    ((24, 50), None, ["names layer 50"]),
    ((12, 24, 36), 2, ["makes 4 stages, and 2 devices are named"]),
    ((24,), 3, ["makes 2 stages, and 3 devices are named"]),
    ((24,), 1, ["makes 2 stages, and 1 device is named"]),
])
def test_a_bad_split_is_refused_with_what_was_meant(firsts: tuple[int, ...], devices: int | None, words: list[str]) -> None:
    with pytest.raises(SettingError) as refused:
        asked_split(firsts, 48, devices)
    assert refused.value.message.startswith(f"layer_split: {','.join(map(str, firsts))} ")
    assert all(word in refused.value.message for word in words), refused.value.message
    # What is proposed is accepted.
    for proposed in refused.value.message.split("write ")[1:]:
        asked_split(tuple(map(int, proposed.split(","))), 48, devices)


@given(st.integers(1, 64), st.integers(1, 8))
def test_threads_are_shared_out_evenly(threads: int, stages: int) -> None:
    shares = share_threads(threads, stages)
    assert len(shares) == stages and min(shares) >= 1 and max(shares) - min(shares) <= 1
    assert sum(shares) == max(threads, stages) and shares == sorted(shares, reverse=True)
