"""Routing against NumPy: logits in the documented order to the bit, ids equal, weights but for the last bits of exp."""

from dataclasses import replace

import numpy as np
import pytest

from strata.kernels.route import (
    Groups, Router, RouteSpace, Routing, Visits, allocate_route, group_visits, most_tiles, num_tiles, route, tiles_for,
)  # fmt: skip
from tests.kernels import twins

pytestmark = pytest.mark.cxx
f32 = np.float32
SOFTMAX, SIGMOID = Routing(4, False, True), Routing(3, True, True, scale=2.5)


def logits_twin(x, weights):
    """float32 [rows, experts]: lane l adds elements 4l .. 4l + 3, then 128 further; then the tree."""
    width = -(-x.shape[1] // 128) * 128
    padded = [np.zeros((len(m), width), f32) for m in (x, weights)]
    for to, m in zip(padded, (x, weights)):
        to[:, : m.shape[1]] = m
    x, weights = (m.reshape(len(m), -1, 32, 4) for m in padded)
    lanes = np.zeros((len(x), len(weights), 32), f32)
    for step in range(x.shape[1]):
        for i in range(4):
            lanes = twins.fma(np.broadcast_to(x[:, None, step, :, i], lanes.shape), weights[None, :, step, :, i], lanes)
    return twins.tree(lanes)


def visits_twin(logits, bias, rule):
    """(ids, weights), one row after the other, as the rule is told to people."""
    ids, weights = [], []
    for row in logits:
        exp = np.exp(row - row.max())
        scores = 1 / (1 + np.exp(-row)) if rule.sigmoid else exp / exp.sum()
        ranks = scores + (0 if bias is None else bias)
        groups = ranks.reshape(rule.groups, -1)
        worth = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        allowed = np.isin(np.arange(len(row)) // groups.shape[1], np.argsort(-worth, kind="stable")[: rule.groups_used])
        order = np.lexsort((np.arange(len(row)), -ranks, ~allowed))[: rule.used]
        chosen = scores[order]
        ids.append(order)
        weights.append((chosen / max(chosen.sum(), 2.0**-14) if rule.normalised else chosen) * rule.scale)
    return np.array(ids, np.int32), np.array(weights, f32)


def run(bench, x, gamma, weights, bias, rule):
    """(ids, weights, logits). Scratch and results begin as NaN, and twice is the same as once."""
    router = Router(bench.put(weights), None if bias is None else bench.put(bias))
    space = allocate_route(bench.device, len(x), len(weights), bench.stream)
    visits = Visits(bench.empty((len(x), rule.used), np.int32), bench.empty((len(x), rule.used)))
    for _ in range(2):
        route(bench.device, bench.put(x), bench.put(gamma), 1e-5, router, rule, space, visits, bench.stream)
    assert not bench.get(space.arrived).any()
    return bench.get(visits.ids), bench.get(visits.weights), bench.get(space.logits)


def case(rng, rows, experts, width=160):
    x, weights = rng.standard_normal((rows, width)).astype(f32), rng.standard_normal((experts, width)).astype(f32) / 8
    return x, rng.uniform(0.5, 1.5, width).astype(f32), weights, rng.uniform(-0.2, 0.2, experts).astype(f32)


@pytest.mark.parametrize("rule, experts, rows", [
    (SOFTMAX, 40, 3), (SIGMOID, 8, 9), (replace(SOFTMAX, used=1, normalised=False), 5, 2),
    (replace(SIGMOID, groups=4, groups_used=2), 16, 11), (replace(SOFTMAX, used=10), 130, 1),
])  # fmt: skip
def test_routing_is_the_twin(bench, rng, rule, experts, rows):
    """Router weights that fill no block, rows that fill no tile; with a bias where scores are sigmoids."""
    x, gamma, weights, bias = case(rng, rows, experts)
    bias = bias if rule.sigmoid else None
    ids, got, logits = run(bench, x, gamma, weights, bias, rule)
    normed = twins.rms_norm(x, gamma, 1e-5)
    wanted = logits_twin(normed, weights)
    np.testing.assert_allclose(logits, wanted, atol=1e-6)
    assert (logits == wanted).mean() > 0.99
    wanted_ids, wanted_weights = visits_twin(wanted, bias, rule)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(got, wanted_weights, rtol=2e-6)


def test_equal_scores_go_to_the_lowest_ids(one_bench, rng):
    x, gamma, weights, _ = case(rng, 2, 12)
    weights[:] = weights[0]
    bias = np.zeros(12, f32)
    bias[7] = 0.1
    ids, got, _ = run(one_bench, x, gamma, weights, bias, SIGMOID)
    np.testing.assert_array_equal(ids, [[7, 0, 1]] * 2)
    np.testing.assert_allclose(got, 2.5 / 3, rtol=1e-6)


@pytest.mark.parametrize("rule", [SOFTMAX, SIGMOID])
def test_a_row_does_not_see_its_neighbours_and_a_broken_one_says_so(bench, rng, rule):
    """Alone, and at every place of windows of few rows and of many, beside rows that are NaN; their ids stay in range."""
    x, gamma, weights, bias = case(rng, 20, 24, width=64)
    alone = run(bench, x[:1], gamma, weights, bias, rule)
    for rows, places in ((2, (0, 1)), (8, range(8)), (20, (0, 7, 8, 19))):
        for place in places:
            window = np.full((rows, 64), np.nan, f32)
            window[place] = x[0]
            got = run(bench, window, gamma, weights, bias, rule)
            for mine, wanted in zip(got, alone):
                np.testing.assert_array_equal(mine[place], wanted[0])
            others = np.arange(rows) != place
            assert np.isnan(got[1][others]).all() and ((got[0] >= 0) & (got[0] < 24)).all()
            assert all(len(set(row)) == rule.used for row in got[0].tolist())


@pytest.mark.parametrize("rows, used, experts, spread", [(3, 2, 8, 8), (40, 4, 6, 6), (33, 8, 64, 64), (300, 1, 3, 1), (12, 3, 5, 2)])
def test_groups_hold_every_visit_once_in_order(bench, rng, rows, used, experts, spread):
    ids = rng.integers(0, spread, (rows, used)).astype(np.int32)
    visits = Visits(bench.put(ids), bench.empty((rows, used)))
    space = Groups(bench.empty((rows * used,), np.int32), bench.empty((most_tiles(rows, used, experts), 4), np.int32), 0)
    groups = group_visits(bench.device, visits, experts, space, bench.stream)
    order, tiles = bench.get(groups.order), bench.get(groups.tiles)
    np.testing.assert_array_equal(order, np.argsort(ids.reshape(-1), kind="stable"))
    assert len(tiles) == num_tiles(rows * used, experts) and groups.size == tiles_for(rows * used, experts)
    assert ((tiles[:, 2] >= 0) & (tiles[:, 2] <= 8 * groups.size) & (tiles[:, 3] == 0)).all()
    filled = tiles[tiles[:, 2] > 0]
    covered = np.concatenate([np.arange(first, first + count) for _, first, count, _ in filled])
    np.testing.assert_array_equal(covered, np.arange(rows * used))
    np.testing.assert_array_equal(np.repeat(filled[:, 0], filled[:, 2]), np.sort(ids.reshape(-1)))


def test_what_does_not_fit_is_refused_by_name(one_bench, rng):
    bench = one_bench
    x, gamma, weights, _ = case(rng, 2, 8)
    with pytest.raises(TypeError, match="gamma must be"):
        run(bench, x, gamma[1:], weights, None, SOFTMAX)
    with pytest.raises(TypeError, match="experts over 158 columns"):
        run(bench, x[:, 2:], gamma[2:], np.ascontiguousarray(weights[:, 2:]), None, SOFTMAX)
    with pytest.raises(TypeError, match="3 of 8 experts in 1 of 4 groups"):
        run(bench, x, gamma, weights, None, replace(SIGMOID, groups=4))
    with pytest.raises(ValueError, match="33 experts a row"):
        replace(SOFTMAX, used=33)
    space = RouteSpace(bench.empty((1, 8)), bench.empty((1,), np.int32))
    visits = Visits(bench.empty((2, 4), np.int32), bench.empty((2, 4)))
    with pytest.raises(TypeError, match="2 rows in a space for 1"):
        route(bench.device, bench.put(x), bench.put(gamma), 1e-5, Router(bench.put(weights), None), SOFTMAX, space, visits, bench.stream)
    with pytest.raises(TypeError, match="8 visits in a space for 3"):
        group_visits(bench.device, visits, 8, Groups(bench.empty((3,), np.int32), bench.empty((9, 4), np.int32), 0), bench.stream)
