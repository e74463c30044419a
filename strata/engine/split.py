"""Where to cut the layers of a model into stages: pure decisions over numbers.

A pipeline is as fast as its busiest stage, so ``balance`` makes the slowest stage as fast as it can be, from what a window costs each
device (stage_cost.py). What only the last stage has (the output matrix, a drafter) is counted there.
A cut that was asked for is kept or refused, with what was probably meant: other servers want counts or shares where we want layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from strata.engine.stage_cost import Costs
from strata.errors import SettingError

Fits = Callable[[int, range], bool]


def balance(stages: Sequence[Costs], fits: Fits = lambda stage, span: True) -> list[range] | None:
    """Consecutive spans, one for each of ``stages``, none empty, so that the largest stage time is least; None where none ``fits``.

    ``stages``: what all layers would cost each stage's device, and the last one beside them. ``fits(stage, span)``: whether a stage may
    have these layers. Among such cuts the other stages are kept even, and a rest goes to the earlier ones: the last has to pick the
    tokens as well. O(stages * layers^2).
    """
    layers, never = len(stages[0].layers), (math.inf, math.inf)
    # best[end]: (largest time, sum of squares) of the stages so far, which hold the layers before ``end``; cuts: where the last one began.
    best = [(0.0, 0.0)] + [never] * layers
    cuts: list[list[int]] = []
    for stage, costs in enumerate(stages):
        sums, extra = [0.0, *accumulate(costs.layers)], costs.last if stage + 1 == len(stages) else 0.0
        times, begins = [never] * (layers + 1), [0] * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for begin in range(end - 1, stage - 1, -1):
                time = sums[end] - sums[begin] + extra
                this = max(best[begin][0], time), best[begin][1] + time * time
                if this < times[end] and fits(stage, range(begin, end)):
                    times[end], begins[end] = this, begin
        best = times
        cuts.append(begins)
    if best[layers] == never:
        return None
    edges = [layers]
    for begins in reversed(cuts):
        edges.append(begins[edges[-1]])
    return spans(edges[-2:0:-1], layers)


def spans(firsts: Sequence[int], layers: int) -> list[range]:
    """The stages whose first layers are 0 and ``firsts``."""
    edges = [0, *firsts, layers]
    return [range(start, stop) for start, stop in zip(edges[:-1], edges[1:], strict=True)]


def asked_split(firsts: Sequence[int], layers: int, devices: int | None) -> list[range]:
    """The stages that ``layer_split`` asks for: ``firsts`` is the first layer of each stage but the first.

    ``devices``: how many were named, None if none were. Raises SettingError for what is no split of so many layers.
    """
    given = ",".join(map(str, firsts))
    wrong = _fault(firsts, layers)
    if not wrong and devices is not None and devices != len(firsts) + 1:
        wrong = f"makes {len(firsts) + 1} stages, and {devices} {'device is' if devices == 1 else 'devices are'} named; one for each stage"
    if wrong:
        raise SettingError(f"layer_split: {given} {wrong}{_meant(firsts, layers, devices)}")
    return spans(firsts, layers)


def _fault(firsts: Sequence[int], layers: int) -> str:
    if firsts[-1] >= layers or firsts[0] < 1:
        bad = firsts[-1] if firsts[-1] >= layers else firsts[0]
        return f"names layer {bad} as the first of a later stage; the model's layers are 0 to {layers - 1}, and stage 0 begins at 0"
    if any(after <= before for before, after in zip(firsts, firsts[1:])):
        return "is not rising; it is the first layer of each stage after the first"
    return ""


def _meant(firsts: Sequence[int], layers: int, devices: int | None) -> str:
    """What to write instead, where the numbers look like something else."""
    if sum(firsts) == layers and min(firsts) > 0 and (devices is None or devices == len(firsts)):
        return f". If these are layers per device, write {','.join(map(str, list(accumulate(firsts))[:-1]))}"
    rising = [first for first in firsts if first]
    if firsts[0] == 0 and rising and not _fault(rising, layers):
        return f". Leave out the 0: {','.join(map(str, rising))}"
    if 0 in firsts or firsts[-1] == layers:
        return ". A device that is to hold no layers is left out of devices"
    return ""


def share_threads(threads: int, stages: int) -> list[int]:
    """Threads of each of several stages on one machine: as even as can be, at least one, the first stages get what is left over."""
    return [max(1, threads // stages + (stage < threads % stages)) for stage in range(stages)]
