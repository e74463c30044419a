"""Products in every layout: few rows, many rows, alone or among others. The integers are exact and the order of floats is
documented, so the twin is met to the bit (but for the double rounding of its fused multiply-add, see twins.fma)."""

import numpy as np
import pytest

from strata.kernels.matmul import linear, linear_swiglu, matmul, matmul_swiglu, uses_matvec
from strata.kernels.matvec import matvec, matvec_swiglu
from strata.kernels.tensors import Activations, put_grid, put_matrix
from strata.weights.formats import BY_NAME
from strata.weights.layouts import LAYOUTS, expand
from strata.weights.recode import layouts_for, recode
from tests.kernels import twins
from tests.kernels.devices import ON_GPU

pytestmark = pytest.mark.cxx

FORMAT_OF = {
    "packed3": "IQ3_S", "odd4": "IQ3_S", "flat4": "Q4_0", "affine4": "Q4_1", "super4": "Q4_K", "flat8": "Q8_0",
    "affine8": "Q5_1", "super8": "IQ2_S", "affine_super8": "Q5_K", "half": "F16",
}  # fmt: skip
INTEGER = sorted(set(FORMAT_OF) - {"half"})


def weights(rng, layout, rows, columns):
    """Random blocks with scales of a sane size: float16 fields are drawn, all other bits are random."""
    format = BY_NAME[FORMAT_OF[layout]]
    blocks = rng.integers(0, 256, format.size(rows * columns), dtype=np.uint8).view(format.dtype)
    for field in format.dtype.names:
        if format.dtype[field] == np.float16:
            blocks[field] = rng.uniform(-0.01, 0.01, len(blocks))
    return recode(format, blocks.view(np.uint8), rows, columns, LAYOUTS[layout])


def put_activations(bench, x):
    codes, meta = twins.quantize(x)
    return Activations(x.shape[1], bench.put(codes), bench.put(meta)), codes, meta


def put(bench, tensor, bias=None):
    return put_matrix(bench.device, tensor, put_grid(bench.device, bench.stream), bench.stream, bias)


def close(got, wanted):
    """Equal but for a last bit where the twin's fused multiply-add rounds twice."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
    assert (got == wanted).mean() > 0.99


def test_every_layout_has_a_case():
    assert set(FORMAT_OF) == set(LAYOUTS)
    for layout, name in FORMAT_OF.items():
        assert LAYOUTS[layout] in layouts_for(BY_NAME[name])


@pytest.mark.parametrize("layout", INTEGER)
def test_matvec_and_matmul_are_the_twin(bench, rng, layout):
    """30 rows do not fill the last tile; 2304 columns give the chains one and two pairs."""
    tensor = weights(rng, layout, 30, 2304)
    bias = rng.standard_normal(30).astype(np.float32)
    x, codes, meta = put_activations(bench, rng.standard_normal((1, 2304)).astype(np.float32))
    wanted = twins.product(tensor, codes, meta)
    for with_bias in (None, bias):
        for launch in (matvec, matmul):
            y = bench.empty((1, 30))
            launch(bench.device, put(bench, tensor, with_bias), x, y, bench.stream)
            close(bench.get(y), wanted if with_bias is None else wanted + bias)


@pytest.mark.parametrize("layout", INTEGER)
def test_a_row_has_the_same_bits_alone_and_in_any_company(one_bench, rng, layout):
    """Few rows (dp4a) and many (matrix units), every place, neighbours that are NaN. Every batch size for one layout; what differs
    between layouts is how weights are read, which the sizes do not touch. On a GPU every size and place of all of them."""
    bench, columns = one_bench, 512
    matrix = put(bench, weights(rng, layout, 32, columns))
    row = rng.standard_normal(columns).astype(np.float32)
    alone = bench.empty((1, 32))
    matvec(bench.device, matrix, put_activations(bench, row[None])[0], alone, bench.stream)
    alone = bench.get(alone)[0]
    sizes = [(8, matvec), (1, matmul), (40, matmul)]
    if layout == "odd4":
        sizes = [(count, matvec) for count in range(2, 9)] + [(count, matmul) for count in (1, 8, 9, 17, 32, 64, 65)]
    if ON_GPU:
        sizes = [(count, matvec if count <= 8 else matmul) for count in range(2, 33)] + [(1, matmul), (8, matmul), (65, matmul)]
    for count, launch in sizes:
        for place in range(count) if count <= (32 if ON_GPU else 8) else (0, 7, 8, count - 1):
            x = np.broadcast_to(row, (count, columns)).copy()
            x[np.arange(count) != place] = rng.standard_normal((count - 1, columns)) * 1e3
            codes, meta = twins.quantize(x)
            meta[np.arange(count) != place, :, 0] = 0x7FC00000
            y = bench.empty((count, 32))
            launch(bench.device, matrix, Activations(columns, bench.put(codes), bench.put(meta)), y, bench.stream)
            got = bench.get(y)
            np.testing.assert_array_equal(got[place], alone, err_msg=f"row {place} of {count} by {launch.__name__}")
            assert np.isnan(np.delete(got, place, axis=0)).all()


def test_packed_and_nibbles_give_the_same_bits(one_bench, rng):
    tensor = weights(rng, "odd4", 16, 768)
    format = BY_NAME["IQ3_S"]
    blocks = rng.integers(0, 256, format.size(16 * 768), dtype=np.uint8).view(format.dtype)
    blocks["d"] = rng.uniform(-0.1, 0.1, len(blocks))
    x, *_ = put_activations(one_bench, rng.standard_normal((2, 768)).astype(np.float32))
    results = []
    for layout in layouts_for(format):
        tensor = recode(format, blocks.view(np.uint8), 16, 768, layout)
        y = one_bench.empty((2, 16))
        linear(one_bench.device, put(one_bench, tensor), x, y, one_bench.stream)
        results.append(one_bench.get(y))
    np.testing.assert_array_equal(*results)


def test_half_weights_are_multiplied_as_stored(bench, rng):
    """The matrix unit's sums of 32 products are not NumPy's: a few units in the last place of the largest partial sum."""
    tensor = weights(rng, "half", 20, 320)
    tensor.codes.view(np.float16)[:] = rng.standard_normal((20, 320))
    x, codes, meta = put_activations(bench, rng.standard_normal((11, 320)).astype(np.float32))
    wanted = twins.expand_activations(codes, meta).astype(np.float64) @ expand(tensor).astype(np.float64).T
    y = bench.empty((11, 20))
    linear(bench.device, put(bench, tensor), x, y, bench.stream)
    np.testing.assert_allclose(bench.get(y), wanted, atol=3e-5)
    assert not uses_matvec("half", 1)
    alone = bench.empty((1, 20))
    linear(bench.device, put(bench, tensor), x.rows(7, 8), alone, bench.stream)
    np.testing.assert_array_equal(bench.get(alone)[0], bench.get(y)[7])


@pytest.mark.parametrize("layout", ["super4", "half"])
@pytest.mark.parametrize("count", [2, 12])
def test_swiglu_ends_the_product_of_interleaved_rows(bench, rng, layout, count):
    """exp differs in the last bit between libraries, which may move a code by one at a rounding edge."""
    tensor = weights(rng, layout, 128, 256)
    if layout == "half":
        tensor.codes.view(np.float16)[:] = rng.standard_normal((128, 256)) / 4
    x, codes, meta = put_activations(bench, rng.standard_normal((count, 256)).astype(np.float32))
    matrix = put(bench, tensor, rng.standard_normal(128).astype(np.float32))
    y = bench.empty((count, 128))
    linear(bench.device, matrix, x, y, bench.stream)
    gate, up = bench.get(y)[:, 0::2], bench.get(y)[:, 1::2]
    with np.errstate(over="ignore"):
        wanted_codes, wanted_meta = twins.quantize(gate / (1 + np.exp(-gate)) * up)
    out = Activations(64, bench.empty((count, 64), np.int8), bench.empty((count, 2, 2), np.uint32))
    linear_swiglu(bench.device, matrix, x, out, bench.stream)
    got, got_meta = bench.get(out.codes), bench.get(out.meta)
    assert np.abs(got.astype(int) - wanted_codes).max() <= 1 and (got == wanted_codes).mean() > 0.99
    np.testing.assert_allclose(got_meta[..., 0].copy().view(np.float32), wanted_meta[..., 0].copy().view(np.float32), rtol=1e-6)
    sums = got_meta[..., 1].copy().view(np.int16).reshape(count, 2, 2)
    np.testing.assert_array_equal(sums, got.reshape(count, 2, 2, 16).sum(axis=3))
    if layout != "half" and count <= 8:
        again = Activations(64, bench.empty((count, 64), np.int8), bench.empty((count, 2, 2), np.uint32))
        matmul_swiglu(bench.device, matrix, x, again, bench.stream)
        np.testing.assert_array_equal(bench.get(again.codes), got)


def test_wrong_shapes_are_refused_by_name(one_bench, rng):
    bench = one_bench
    matrix = put(bench, weights(rng, "flat8", 64, 64))
    x, *_ = put_activations(bench, np.ones((2, 64), np.float32))
    other, *_ = put_activations(bench, np.ones((2, 128), np.float32))
    for bad, y, message in [
        (x, bench.empty((3, 64)), "y must be"), (other, bench.empty((2, 64)), "128 activations per row for 64"),
        (x, bench.empty((2, 63)), "y must be"),
        (x, bench.empty((2, 64), np.float64), "y must be float32"),
    ]:  # fmt: skip
        with pytest.raises(TypeError, match=message):
            matvec(bench.device, matrix, bad, y, bench.stream)
    nine, *_ = put_activations(bench, np.ones((9, 64), np.float32))
    with pytest.raises(TypeError, match="1 to 8 rows, not 9"):
        matvec(bench.device, matrix, nine, bench.empty((9, 64)), bench.stream)
    with pytest.raises(TypeError, match="gate and up rows"):
        matvec_swiglu(bench.device, matrix, x, Activations(64, x.codes, x.meta), bench.stream)
