"""Products with experts: a visit's bits are the ones of a plain product with that expert's weights, one by one and grouped alike."""

import numpy as np
import pytest

from strata.kernels.experts import MAX_COUNT, Experts, expert_down, expert_swiglu, lanes_for, one_by_one
from strata.kernels.matmul import linear
from strata.kernels.parts import linear_swiglu_parts
from strata.kernels.route import Groups, Visits, group_visits, most_tiles
from strata.kernels.tensors import Activations, allocate_activations
from strata.weights.layouts import Recoded
from tests.kernels import twins
from tests.kernels.test_matvec import put, put_activations, weights

pytestmark = pytest.mark.cxx
f32 = np.float32
EXPERTS, ROWS, INNER = 5, 64, 64


def tensor_of(rng, layout, rows, columns):
    tensor = weights(rng, layout, EXPERTS * rows, columns)
    if layout == "half":
        tensor.codes.view(np.float16)[:] = rng.standard_normal((EXPERTS * rows, columns)) / 8
    return tensor


def of_expert(tensor, expert):
    """The rows of one expert, as a tensor of its own."""
    rows = tensor.rows // EXPERTS
    planes = (plane[expert * rows : (expert + 1) * rows] for plane in (tensor.codes, tensor.scales, tensor.steps))
    return Recoded(tensor.layout, tensor.columns, *planes, tensor.unit)


def some_visits(bench, rng, count, used):
    ids = np.stack([rng.permutation(EXPERTS)[:used] for _ in range(count)]).astype(np.int32)
    factors = rng.uniform(0.1, 1.0, ids.shape).astype(f32)
    return Visits(bench.put(ids), bench.put(factors)), ids, factors


def groups_of(bench, visits):
    count = visits.count
    space = Groups(bench.empty((count,), np.int32), bench.empty((most_tiles(count, 1, EXPERTS), 4), np.int32), 0)
    return group_visits(bench.device, visits, EXPERTS, space, bench.stream)


def swiglu(bench, tensors, x, visits, groups):
    out = Activations(INNER, bench.empty((visits.count, INNER), np.int8), bench.empty((visits.count, INNER // 32, 2), np.uint32))
    gate, up = (Experts(EXPERTS, put(bench, tensor)) for tensor in tensors)
    expert_swiglu(bench.device, gate, up, x, visits, groups, out, bench.stream)
    return bench.get(out.codes), bench.get(out.meta)


def down(bench, tensor, x, visits, groups, shared=None):
    y, part = bench.empty((visits.ids.shape[0], tensor.rows // EXPERTS)), bench.empty((visits.count, tensor.rows // EXPERTS))
    expert_down(bench.device, Experts(EXPERTS, put(bench, tensor)), x, visits, groups, part, shared, y, bench.stream)
    return bench.get(y)


@pytest.mark.parametrize("gate, up, columns, count, used", [
    ("odd4", "odd4", 256, 3, 2), ("packed3", "super8", 768, 2, 3), ("affine_super8", "flat4", 1280, 1, 2), ("half", "half", 256, 2, 2),
])  # fmt: skip
def test_swiglu_of_a_visit_is_that_of_its_expert(bench, rng, gate, up, columns, count, used):
    """Products by 8, 16 and 32 lanes; one by one and grouped."""
    tensors = [tensor_of(rng, layout, INNER, columns) for layout in (gate, up)]
    x, *_ = put_activations(bench, rng.standard_normal((count, columns)).astype(f32))
    visits, ids, _ = some_visits(bench, rng, count, used)
    ways = [swiglu(bench, tensors, x, visits, groups_of(bench, visits))]
    if one_by_one((gate, up), count):
        ways.append(swiglu(bench, tensors, x, visits, None))
    for visit, expert in enumerate(ids.reshape(-1)):
        out = allocate_activations(bench.device, 1, INNER)
        parts = [put(bench, of_expert(tensor, expert)) for tensor in tensors]
        linear_swiglu_parts(bench.device, parts, x.rows(visit // used, visit // used + 1), out, bench.stream)
        for codes, meta in ways:
            np.testing.assert_array_equal(codes[visit], bench.get(out.codes)[0])
            np.testing.assert_array_equal(meta[visit], bench.get(out.meta)[0])


@pytest.mark.parametrize("layout, rows, columns, count, used", [
    ("flat8", 30, 64, 2, 3), ("super4", 16, 768, 8, 2), ("odd4", 24, 2304, 1, 5), ("half", 20, 128, 3, 2), ("flat8", 16, 64, 20, 3),
])  # fmt: skip
def test_down_is_the_sum_over_the_rows_visits_in_order(bench, rng, layout, rows, columns, count, used):
    tensor = tensor_of(rng, layout, rows, columns)
    visits, ids, factors = some_visits(bench, rng, count, used)
    x, *_ = put_activations(bench, rng.standard_normal((count * used, columns)).astype(f32))
    shared = rng.standard_normal((count, rows)).astype(f32)
    products = np.empty((count, used, rows), f32)
    for visit, expert in enumerate(ids.reshape(-1)):
        y = bench.empty((1, rows))
        linear(bench.device, put(bench, of_expert(tensor, expert)), x.rows(visit, visit + 1), y, bench.stream)
        products[visit // used, visit % used] = bench.get(y)[0]
    wanted = np.zeros((count, rows), f32)
    for i in range(used):
        wanted = twins.fma(np.broadcast_to(factors[:, i, None], wanted.shape), products[:, i], wanted)
    for groups in (groups_of(bench, visits), None) if one_by_one([layout], count) else (groups_of(bench, visits),):
        for with_shared in (False, True):
            got = down(bench, tensor, x, visits, groups, bench.put(shared) if with_shared else None)
            expected = wanted + shared if with_shared else wanted
            np.testing.assert_allclose(got, expected, atol=1e-6)
            assert (got == expected).mean() > 0.98  # the rest: the twin's fused multiply-add rounds twice


def test_a_row_has_the_same_bits_alone_and_in_any_company(one_bench, rng):
    """One row with its visits at every place of few rows and of many, whose other rows are NaN and go anywhere."""
    bench, used = one_bench, 2
    gate, up, last = (tensor_of(rng, layout, 64, columns) for layout, columns in (("odd4", 256), ("odd4", 256), ("flat8", INNER)))
    row, ids, factors = rng.standard_normal(256).astype(f32), rng.permutation(EXPERTS)[:used], rng.uniform(0.1, 1, used)

    def run(count, place):
        codes, meta = twins.quantize(np.where(np.arange(count)[:, None] == place, row, rng.standard_normal((count, 256))).astype(f32))
        meta[np.arange(count) != place, :, 0] = 0x7FC00000
        every_id = rng.integers(0, EXPERTS, (count, used)).astype(np.int32)
        every_factor = np.ones((count, used), f32)
        every_id[place], every_factor[place] = ids, factors
        visits = Visits(bench.put(every_id), bench.put(every_factor))
        groups = None if count <= MAX_COUNT else groups_of(bench, visits)
        hidden = swiglu(bench, (gate, up), Activations(256, bench.put(codes), bench.put(meta)), visits, groups)
        y = down(bench, last, Activations(INNER, *map(bench.put, hidden)), visits, groups)
        assert np.isnan(np.delete(y, place, axis=0)).all()
        return y[place]

    alone = run(1, 0)
    assert np.isfinite(alone).all()
    for count in (2, 3, 8, 9, 40):
        for place in range(count) if count <= 3 else (0, count // 2, count - 1):
            np.testing.assert_array_equal(run(count, place), alone, err_msg=f"row {place} of {count}")


def test_the_sum_can_be_written_over_the_shared_experts_output(one_bench, rng):
    bench = one_bench
    tensor = tensor_of(rng, "flat8", ROWS, INNER)
    for count in (2, 12):
        visits, *_ = some_visits(bench, rng, count, 2)
        x, *_ = put_activations(bench, rng.standard_normal((2 * count, INNER)).astype(f32))
        groups = None if count <= MAX_COUNT else groups_of(bench, visits)
        y = bench.put(rng.standard_normal((count, ROWS)).astype(f32))
        apart = down(bench, tensor, x, visits, groups, y)
        part = bench.empty((visits.count, ROWS))
        expert_down(bench.device, Experts(EXPERTS, put(bench, tensor)), x, visits, groups, part, y, y, bench.stream)
        np.testing.assert_array_equal(bench.get(y), apart)


def test_lanes_suffice_for_the_width():
    assert [lanes_for(width) for width in (64, 512, 576, 1024, 1088, 4096)] == [8, 8, 16, 16, 32, 32]


def test_wrong_shapes_are_refused_by_name(one_bench, rng):
    bench = one_bench
    tensors = [tensor_of(rng, "flat8", INNER, 64)] * 2
    x, *_ = put_activations(bench, np.ones((2, 64), f32))
    visits, *_ = some_visits(bench, rng, 2, 2)
    with pytest.raises(TypeError, match="64 gate and 128 up rows"):
        swiglu(bench, [tensors[0], tensor_of(rng, "flat8", 128, 64)], x, visits, None)
    with pytest.raises(TypeError, match="2 rows of \\('half', 'half'\\) one by one"):
        swiglu(bench, [tensor_of(rng, "half", INNER, 64)] * 2, x, visits, None)
    with pytest.raises(TypeError, match="2 activations for 4 visits"):
        down(bench, tensors[0], x, visits, None)
    other, *_ = some_visits(bench, rng, 3, 2)
    with pytest.raises(TypeError, match="order must be"):
        swiglu(bench, tensors, x, visits, groups_of(bench, other))
