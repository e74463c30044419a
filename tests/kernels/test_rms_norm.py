"""RMSNorm and embedding rows against NumPy in the same order of operations: the same bits."""

import numpy as np
import pytest

from strata.kernels.embed import embed
from strata.kernels.rms_norm import rms_norm
from strata.kernels.tensors import allocate_activations, put_grid, put_matrix
from strata.weights.formats import BY_NAME
from strata.weights.layouts import expand
from strata.weights.recode import layouts_for, recode
from tests.kernels import twins

pytestmark = pytest.mark.cxx
f32 = np.float32


@pytest.mark.parametrize("columns", [64, 576, 1000])
@pytest.mark.parametrize("added", [False, True])
def test_the_norm_is_the_twin_to_the_bit(bench, rng, columns, added):
    x, delta = rng.standard_normal((2, 5, columns)).astype(f32)
    gamma, rows = rng.standard_normal(columns).astype(f32), np.array([4, 1, 2], np.int32)
    hidden, out = bench.put(x), allocate_activations(bench.device, 3, columns)
    rms_norm(bench.device, bench.put(rows), hidden, bench.put(delta) if added else None, bench.put(gamma), 1e-5, out, bench.stream)
    summed = x + delta if added else x
    codes, meta = twins.quantize(twins.rms_norm(summed[rows], gamma, 1e-5))
    np.testing.assert_array_equal(bench.get(out.codes), codes)
    np.testing.assert_array_equal(bench.get(out.meta), meta)
    x[rows] = summed[rows]
    np.testing.assert_array_equal(bench.get(hidden), x)


def test_a_row_does_not_see_its_neighbours_and_a_nan_stays_in_its_row(bench, rng):
    x = rng.standard_normal((8, 96)).astype(f32)
    gamma = bench.put(np.ones(96, f32))

    def run(values):
        out = allocate_activations(bench.device, len(values), 96)
        rms_norm(bench.device, bench.put(np.arange(len(values), dtype=np.int32)), bench.put(values), None, gamma, 1e-5, out, bench.stream)
        return bench.get(out.codes), bench.get(out.meta)

    alone = [run(x[i : i + 1]) for i in range(8)]
    x[3, 50] = np.nan
    codes, meta = run(x)
    for i in (0, 1, 2, 4, 5, 6, 7):
        np.testing.assert_array_equal(codes[i], alone[i][0][0])
        np.testing.assert_array_equal(meta[i], alone[i][1][0])
    assert np.isnan(meta[3, :3, 0].copy().view(f32)).all()


@pytest.mark.parametrize("name", ["IQ3_S", "Q4_K", "Q6_K", "Q8_0", "Q5_1", "F16"])
def test_embedding_rows_are_the_files_floats(bench, rng, name):
    format, columns = BY_NAME[name], 256
    data = rng.integers(0, 256, format.size(6 * columns), dtype=np.uint8)
    if name == "F16":
        data = rng.standard_normal((6, columns)).astype(np.float16).view(np.uint8).reshape(-1)
    tokens = np.array([5, 0, 3, 3, 99], np.int32)
    for layout in layouts_for(format):
        tensor = recode(format, data, 6, columns, layout)
        matrix = put_matrix(bench.device, tensor, put_grid(bench.device, bench.stream), bench.stream)
        y = bench.empty((5, columns))
        embed(bench.device, matrix, bench.put(tokens), y, bench.stream)
        np.testing.assert_array_equal(bench.get(y), expand(tensor)[[5, 0, 3, 3, 5]])
