"""Where the layers are cut: balanced against brute force, asked for and refused with what was meant."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.split import asked_split, balance, share_threads, spans
from strata.engine.stage_cost import Costs
from strata.errors import SettingError


def stage_times(cut: list[range], stages: list[Costs]) -> list[float]:
    times = [sum(stage.layers[layer] for layer in span) for stage, span in zip(stages, cut, strict=True)]
    times[-1] += stages[-1].last
    return times


def even(layers: int, stages: int, last: float = 0.0) -> list[Costs]:
    return [Costs((1.0,) * layers, last)] * stages


@given(st.data())
def test_no_other_cut_is_faster(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 9))
    several = st.lists(st.integers(1, 20), min_size=layers, max_size=layers)
    stages = [Costs(tuple(data.draw(several)), data.draw(st.integers(0, 40))) for _ in range(data.draw(st.integers(1, layers)))]
    room = data.draw(st.lists(st.integers(1, 100), min_size=len(stages), max_size=len(stages)))

    def fits(stage: int, span: range) -> bool:
        return sum(stages[stage].layers[layer] for layer in span) <= room[stage]

    every = [spans(firsts, layers) for firsts in combinations(range(1, layers), len(stages) - 1)]
    every = [cut for cut in every if all(fits(stage, span) for stage, span in enumerate(cut))]
    found = balance(stages, fits)
    assert (found is None) == (not every)
    if found is not None:
        assert found in every
        assert max(stage_times(found, stages)) == pytest.approx(min(max(stage_times(cut, stages)) for cut in every))


def test_what_is_known_by_hand() -> None:
    assert balance(even(48, 4)) == [range(0, 12), range(12, 24), range(24, 36), range(36, 48)]
    assert balance(even(7, 3)) == [range(0, 3), range(3, 5), range(5, 7)], "a rest goes to the earlier stages"
    assert balance(even(30, 2, last=8.0)) == [range(0, 19), range(19, 30)], "the output matrix is worth eight layers"
    assert balance([Costs((0.5,) * 9, 0.0), *even(9, 1)]) == [range(0, 6), range(6, 9)], "the faster device has more"
    likes_the_end = Costs((2.0,) * 6 + (0.5,) * 2, 0.0)
    assert balance([*even(8, 1), likes_the_end]) == [range(0, 5), range(5, 8)], "a device may be good at some layers"
    assert balance(even(3, 4)) is None, "a stage would be empty"


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
