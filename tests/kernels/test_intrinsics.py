"""The intrinsics' host bodies against NumPy, bit for bit."""

import numpy as np
import pytest

from strata.kernels.intrinsics import intrinsics

pytestmark = pytest.mark.cxx
f32 = np.float32


def tree(values):
    """The sum in the order of a butterfly of shuffles: adjacent pairs first."""
    values = np.asarray(values)
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


def fragments(words, rows_of, dtype):
    """A matrix from mma fragments: register i of lane 4g + t: row g + 8 (i % rows_of), from k = (i // rows_of) 4 items + t items."""
    items = 4 // np.dtype(dtype).itemsize
    registers = words.shape[1]
    matrix = np.zeros((8 * min(2, rows_of), 4 * items * max(1, registers // rows_of)), dtype)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(registers):
            k = 4 * items * (i // rows_of) + items * t
            matrix[g + 8 * (i % rows_of), k:k + items] = words[lane, i:i + 1].view(dtype)
    return matrix


def results_of(matrix):
    """What lane 4g + t holds of C [16, 8]: rows g and g + 8, columns 2t and 2t + 1."""
    return np.array([[matrix[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] for i in range(4)] for lane in range(32)])


def quarter_halves(words):
    halves = np.stack([(words & 15).astype(int) - 8, (words >> 8 & 15).astype(int) - 8], -1) * 0.25
    return halves.astype(np.float16).view(np.uint32)[..., 0]


def test_every_intrinsic_is_what_numpy_says(bench, rng):
    words = rng.integers(0, 2**32, (32, 8), dtype=np.uint32)
    out = bench.empty((32, 24), np.uint32)
    intrinsics(bench.device, bench.put(words), out, bench.stream)
    y = bench.get(out)

    x = words.astype(np.int64)
    small = ((x[:, 0] % 2001) - 1000).astype(f32)
    bytes_ = words.view(np.int8).reshape(32, 8, 4).astype(np.int64)
    wanted = {
        2: ((bytes_[:, 0] * bytes_[:, 1]).sum(1) + x[:, 2]).astype(np.uint32),
        3: np.rint(small * f32(0.125)).astype(np.int32).view(np.uint32),
        4: np.where(bytes_[:, 0] < 0, 255, 0).astype(np.uint8).view(np.uint32)[:, 0],
        5: (x[:, 0] * x[:, 1].astype(object) >> 32).astype(np.uint32),
        6: np.array([bin(w).count("1") for w in x[:, 0]], np.uint32),
        7: np.full(32, int(sum((int(w) & 1) << i for i, w in enumerate(x[:, 0]))), np.uint32),
        8: np.full(32, words[5, 0]),
        9: words[np.arange(32) ^ 6, 0],
        10: words[np.maximum(np.arange(32) - 3, np.where(np.arange(32) < 3, np.arange(32), 0)), 0],
        11: words[np.where(np.arange(32) + 3 < 32, np.arange(32) + 3, np.arange(32)), 0],
        12: np.full(32, tree(small * f32(1.1))).view(np.uint32),
        13: np.full(32, small.max()).view(np.uint32),
        14: np.full(32, x[:, 0].sum()).astype(np.uint32),
        15: np.full(32, tree(small * f32(1.1))).view(np.uint32),
    }
    for column, values in wanted.items():
        np.testing.assert_array_equal(y[:, column], values, err_msg=f"word {column}")

    a32, b32 = fragments(words[:, :4], 2, np.int8).astype(int), fragments(words[:, 4:6], 1, np.int8).astype(int)
    a16, b16 = fragments(words[:, :2], 2, np.int8).astype(int), fragments(words[:, 4:5], 1, np.int8).astype(int)
    start = np.arange(1, 5)
    both = results_of(a32 @ b32.T) + start + 65536 * (results_of(a16 @ b16.T) + start)
    np.testing.assert_array_equal(y[:, 16:20], both.astype(np.uint32))

    halves = quarter_halves(words)
    product = fragments(halves[:, :4], 2, np.float16).astype(f32) @ fragments(halves[:, 4:6], 1, np.float16).astype(f32).T
    np.testing.assert_array_equal(y[:, 20:24].view(f32), results_of(product) + start)


def test_half_to_float_is_exact_for_every_half(one_bench):
    halves = np.arange(65536, dtype=np.uint16)
    got = convert(one_bench, halves.astype(np.uint32), np.zeros(65536, np.uint32))[0].view(f32)
    np.testing.assert_array_equal(got, halves.view(np.float16).astype(f32))


def test_float_to_half_rounds_to_nearest_even(one_bench, rng):
    halves = np.arange(0, 0x7C00, dtype=np.uint16).view(np.float16).astype(f32)
    middles = (halves[1:] + halves[:-1]) / 2
    floats = np.concatenate([halves, middles, np.nextafter(middles, f32(1e9)), np.nextafter(middles, f32(0)),
                             np.array([65519, 65520, 1e30, np.inf, 1e-9, 0], f32), rng.standard_normal(99).astype(f32)])
    floats = np.concatenate([floats, -floats])
    got = convert(one_bench, np.zeros(len(floats), np.uint32), floats.view(np.uint32))[1].astype(np.uint16)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, floats.astype(np.float16).view(np.uint16))


def convert(bench, first, second):
    """Words 0 and 1 of many lanes, 32 at a time."""
    count = -(-len(first) // 32) * 32
    words = np.zeros((count, 8), np.uint32)
    words[:len(first), 0], words[:len(second), 1] = first, second
    outs = []
    for start in range(0, count, 32):
        out = bench.empty((32, 24), np.uint32)
        intrinsics(bench.device, bench.put(words[start:start + 32]), out, bench.stream)
        outs.append(out)
    y = np.concatenate([bench.get(out) for out in outs])
    return y[:len(first), 0].copy(), y[:len(first), 1].copy()
