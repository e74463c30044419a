"""Several matrices in one launch: to the bit what a launch for each gives, whatever their layouts, biases and the number of rows."""

import numpy as np
import pytest

from strata.kernels.matmul import linear, linear_swiglu
from strata.kernels.parts import linear_parts, linear_swiglu_parts
from strata.kernels.tensors import Activations
from strata.weights.recode import interleave
from tests.kernels import twins
from tests.kernels.test_matvec import put, put_activations, weights

pytestmark = pytest.mark.cxx
COLUMNS = 512


def outputs(bench, count):
    return Activations(64, bench.empty((count, 64), np.int8), bench.empty((count, 2, 2), np.uint32))


@pytest.mark.parametrize("layouts, counts", [
    (("odd4", "super4"), (1, 2, 7, 12)), (("packed3", "super4", "super8"), (1, 9)), (("super8", "odd4", "super8"), (3,)),
    (("affine_super8", "half"), (1, 10)),
])  # fmt: skip
def test_parts_are_what_single_launches_give(bench, rng, layouts, counts):
    """Rows that end within a block, a bias on every other matrix."""
    tensors = [weights(rng, layout, rows, COLUMNS) for layout, rows in zip(layouts, (48, 20, 17))]
    for tensor in tensors:
        if tensor.layout.name == "half":
            tensor.codes.view(np.float16)[:] = rng.standard_normal((tensor.rows, COLUMNS))
    biases = [rng.standard_normal(tensor.rows).astype(np.float32) if number % 2 else None for number, tensor in enumerate(tensors)]
    matrices = [put(bench, *pair) for pair in zip(tensors, biases)]
    rows = sum(tensor.rows for tensor in tensors)
    for count in counts:
        x, *_ = put_activations(bench, rng.standard_normal((count, COLUMNS)).astype(np.float32))
        together, apart = bench.empty((count, rows)), [bench.empty((count, matrix.rows)) for matrix in matrices]
        linear_parts(bench.device, matrices, x, together, bench.stream)
        for matrix, y in zip(matrices, apart):
            linear(bench.device, matrix, x, y, bench.stream)
        got = bench.get(together)
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, np.concatenate([bench.get(y) for y in apart], axis=1))


@pytest.mark.parametrize("count", [1, 3, 12])
def test_swiglu_of_two_matrices_is_that_of_their_rows_in_turn(one_bench, rng, count):
    bench, tensors = one_bench, [weights(rng, "odd4", 64, COLUMNS) for _ in range(2)]
    gate_bias = rng.standard_normal(64).astype(np.float32)
    both = np.stack([gate_bias, np.zeros(64, np.float32)], axis=1).reshape(-1)
    x, *_ = put_activations(bench, rng.standard_normal((count, COLUMNS)).astype(np.float32))
    apart, joined = outputs(bench, count), outputs(bench, count)
    linear_swiglu_parts(bench.device, [put(bench, tensors[0], gate_bias), put(bench, tensors[1])], x, apart, bench.stream)
    linear_swiglu(bench.device, put(bench, interleave(*tensors), both), x, joined, bench.stream)
    np.testing.assert_array_equal(bench.get(apart.codes), bench.get(joined.codes))
    np.testing.assert_array_equal(bench.get(apart.meta), bench.get(joined.meta))


@pytest.mark.parametrize("layouts, count", [(("flat4", "flat8"), 2), (("super4", "packed3"), 9)])
def test_swiglu_of_two_layouts_is_the_twin(bench, rng, layouts, count):
    """exp differs in the last bit between libraries, which may move a code by one at a rounding edge."""
    matrices = [put(bench, weights(rng, layout, 64, COLUMNS)) for layout in layouts]
    x, *_ = put_activations(bench, rng.standard_normal((count, COLUMNS)).astype(np.float32))
    out, y = outputs(bench, count), bench.empty((count, 128))
    linear_swiglu_parts(bench.device, matrices, x, out, bench.stream)
    linear_parts(bench.device, matrices, x, y, bench.stream)
    gate, up = np.split(bench.get(y), 2, axis=1)
    with np.errstate(over="ignore"):
        codes, meta = twins.quantize(gate / (1 + np.exp(-gate)) * up)
    got = bench.get(out.codes).astype(int)
    assert np.abs(got - codes).max() <= 1 and (got == codes).mean() > 0.99
    scales = bench.get(out.meta)[..., 0].copy().view(np.float32)
    np.testing.assert_allclose(scales, meta[..., 0].copy().view(np.float32), rtol=1e-6)


def test_wrong_shapes_are_refused_by_name(one_bench, rng):
    bench = one_bench
    matrices = [put(bench, weights(rng, "flat8", rows, 64)) for rows in (64, 32, 32, 32)]
    x, *_ = put_activations(bench, np.ones((1, 64), np.float32))
    with pytest.raises(TypeError, match="4 matrices, at most 3"):
        linear_parts(bench.device, matrices, x, bench.empty((1, 160)), bench.stream)
    with pytest.raises(TypeError, match="y must be"):
        linear_parts(bench.device, matrices[:2], x, bench.empty((1, 95)), bench.stream)
    with pytest.raises(TypeError, match="64 gate and 32 up rows"):
        linear_swiglu_parts(bench.device, matrices[:2], x, outputs(bench, 1), bench.stream)
