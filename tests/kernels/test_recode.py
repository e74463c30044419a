"""Layouts for devices: recode, expand, and there are the GGUF decoder's floats, for every format, on random bytes."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from strata.weights.formats import BY_NAME, FORMATS
from strata.weights.layouts import HALF, PACKED3, expand, integers, padded, scales_and_offsets
from strata.weights.recode import WAYS, interleave, join, layouts_for, recode

QUANTISED = sorted(set(WAYS) - {"Q2_0"})
CASES = [(name, layout.name) for name in QUANTISED for layout in layouts_for(BY_NAME[name])]


def random_bytes(rng, format, rows, columns):
    """Any bytes at all: scales may be subnormal, infinite or NaN."""
    return rng.integers(0, 256, format.size(rows * columns), dtype=np.uint8)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("name, layout", CASES)
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_recoded_weights_are_those_of_the_gguf_package(rng, name, layout):
    format, rows = BY_NAME[name], 40
    columns = format.block * 3
    data = random_bytes(rng, format, rows, columns)
    chosen = next(x for x in layouts_for(format) if x.name == layout)
    tensor = recode(format, data, rows, columns, chosen)
    wanted = gguf_dequantize(data.reshape(rows, -1), GGMLQuantizationType[name])
    np.testing.assert_array_equal(expand(tensor), wanted)
    assert tensor.nbytes == chosen.bytes(rows, padded(columns))


def test_q2_0_is_what_its_definition_says(rng):
    format, columns = BY_NAME["Q2_0"], 128
    data = random_bytes(rng, format, 5, columns)
    blocks = data.view(format.dtype).reshape(5, 2)
    codes = np.unpackbits(blocks["qs"], axis=-1, bitorder="little").reshape(5, 2, 64, 2)
    with np.errstate(invalid="ignore"):
        wanted = blocks["d"].astype(np.float32)[..., None] * (codes[..., 0] + 2.0 * codes[..., 1] - 1).astype(np.float32)
    np.testing.assert_array_equal(expand(recode(format, data, 5, columns)), wanted.reshape(5, columns))


def test_every_served_format_has_a_layout():
    for format in FORMATS.values():
        assert layouts_for(format)[0] is (HALF if format.block == 1 else layouts_for(format)[0])
        assert (format.name in WAYS) == (format.block > 1)


def test_packed_and_nibbles_of_iq3_s_have_the_same_integers_and_scales(rng):
    format = BY_NAME["IQ3_S"]
    data = random_bytes(rng, format, 8, 512)
    nibbles, packed = (recode(format, data, 8, 512, layout) for layout in layouts_for(format))
    assert packed.layout is PACKED3 and packed.nbytes == data.size
    np.testing.assert_array_equal(integers(nibbles), integers(packed))
    np.testing.assert_array_equal(scales_and_offsets(nibbles)[0], scales_and_offsets(packed)[0])


@pytest.mark.parametrize("name", ["F16", "BF16", "F32"])
def test_floats_are_rounded_to_half(rng, name):
    values = (rng.standard_normal((3, 40)) * np.exp2(rng.integers(-26, 14, (3, 40)))).astype(np.float32)
    data = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype(np.uint16)}[name]
    tensor = recode(BY_NAME[name], data.view(np.uint8).reshape(-1), 3, 40)
    stored = {"F32": values, "F16": data, "BF16": (data.astype(np.uint32) << 16).view(np.float32) if name == "BF16" else None}[name]
    np.testing.assert_array_equal(expand(tensor), stored.astype(np.float16).astype(np.float32))
    assert tensor.width == 64 and not tensor.codes[:, 80:].any()


def test_rows_are_padded_with_zero_weights(rng):
    format = BY_NAME["Q4_0"]
    data = random_bytes(rng, format, 4, 96)
    tensor = recode(format, data, 4, 96)
    whole = scales_and_offsets(tensor)[0]
    assert tensor.width == 128 and whole.shape == (4, 4) and not whole[:, 3].any()
    assert expand(tensor).shape == (4, 96)


def test_joined_and_interleaved_rows_keep_their_weights(rng):
    format = BY_NAME["Q6_K"]
    first, second = (recode(format, random_bytes(rng, format, 6, 256), 6, 256) for _ in range(2))
    np.testing.assert_array_equal(expand(join([first, second])), np.concatenate([expand(first), expand(second)]))
    both = expand(interleave(first, second))
    np.testing.assert_array_equal(both[0::2], expand(first))
    np.testing.assert_array_equal(both[1::2], expand(second))
    other = recode(BY_NAME["IQ2_S"], random_bytes(rng, BY_NAME["IQ2_S"], 6, 256), 6, 256)
    with pytest.raises(ValueError, match="one layout, unit"):
        join([first, other])  # both super8, but another unit


def test_pieces_do_not_change_the_result(rng, monkeypatch):
    format = BY_NAME["Q5_K"]
    data = random_bytes(rng, format, 9, 512)
    whole = recode(format, data, 9, 512)
    monkeypatch.setattr("strata.weights.recode.PIECE_BYTES", 2 * format.size(512))
    pieces = recode(format, data, 9, 512)
    np.testing.assert_array_equal(whole.codes, pieces.codes)
    np.testing.assert_array_equal(whole.steps, pieces.steps)


def test_what_does_not_fit_is_refused(rng):
    format = BY_NAME["Q8_0"]
    data = random_bytes(rng, format, 2, 64)
    with pytest.raises(ValueError, match="not 3 rows of 64"):
        recode(format, data, 3, 64)
    with pytest.raises(ValueError, match="does not fit the layout packed3"):
        recode(format, data, 2, 64, PACKED3)
