"""Decoding, bit for bit: against the ``gguf`` package, libgguf's quantisers, and the formats' definitions."""

from __future__ import annotations

import math
import struct
import tracemalloc
from dataclasses import dataclass

import gguf as oracle
import libgguf
import numpy as np
import pytest
from numpy.typing import NDArray

from strata.weights.formats import BY_NAME, FORMATS, PIECE_WEIGHTS, Format, dequantize, dequantize_blocks, dequantize_rows
from strata.weights.grids import even_signs, grids, signs
from tools.make_grids import make_grids

IN_ORACLE = [format for format in FORMATS.values() if format.name != "Q2_0"]
IN_GGML = [name for name in BY_NAME if name not in ("F32", "F16", "BF16", "Q2_0")]
# The IQ2 quantisers spend seconds on their search tables before the first weight.
QUANTISED = [name for name in IN_GGML if not name.startswith("IQ2")]


@dataclass
class InMemory:
    type: Format
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def random_blocks(format: Format, count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of random bits, in which only the scales are made finite."""
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, count * format.bytes, dtype=np.uint8)
    blocks = data.view(format.dtype)
    for field in ("d", "m", "dmin", "x"):
        if field in (format.dtype.names or ()):
            kind = blocks[field].dtype
            blocks[field] = random.integers(0, 0x7F00, count) if kind == np.uint16 else random.normal(size=count).astype(kind)
    return data


def same_bits(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> bool:
    assert ours.dtype == theirs.dtype == np.float32
    return np.array_equal(ours.view(np.uint32).reshape(-1), theirs.view(np.uint32).reshape(-1))


@pytest.mark.parametrize("format", IN_ORACLE, ids=repr)
def test_random_bits_as_the_gguf_package(format: Format) -> None:
    """More weights than one piece, and a last piece that is not full."""
    data = random_blocks(format, PIECE_WEIGHTS // format.block + 37)
    theirs = oracle.quants.dequantize(data.reshape(1, -1), oracle.GGMLQuantizationType(format.id))
    assert same_bits(dequantize_blocks(format, data), theirs)


@pytest.mark.parametrize("name", IN_GGML)
def test_random_bits_as_ggml(name: str) -> None:
    format = BY_NAME[name]
    data = random_blocks(format, 64, seed=2).reshape(2, -1)
    theirs = np.asarray(libgguf.dequantize_rows(data, oracle.GGMLQuantizationType[name]), dtype=np.float32)
    assert same_bits(dequantize_blocks(format, data), theirs)


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_weights_come_back(name: str) -> None:
    """What ggml quantises is what we decode: the error of N(0, 1) weights stays that of two or of three and more bits."""
    rows = np.random.default_rng(1).normal(size=(3, 512)).astype(np.float32)
    kind = oracle.GGMLQuantizationType[name]
    stored = np.asarray(libgguf.quantize_rows(rows, kind), dtype=np.uint8)
    ours = dequantize_blocks(BY_NAME[name], stored).reshape(rows.shape)
    assert same_bits(ours, oracle.quants.dequantize(stored, kind))
    assert np.sqrt(np.mean((ours - rows) ** 2)) < (0.35 if name == "Q2_K" else 0.25)


def test_q2_0_by_its_definition() -> None:
    format = BY_NAME["Q2_0"]
    data = random_blocks(format, 100)
    expected = []
    for block in data.reshape(-1, 18):
        (d,) = struct.unpack("<e", block[:2].tobytes())
        expected += [d * ((int(block[2 + place // 4]) >> 2 * (place % 4) & 3) - 1) for place in range(64)]
    assert dequantize_blocks(format, data).tolist() == expected


@pytest.mark.parametrize("format", FORMATS.values(), ids=repr)
def test_sizes_as_the_gguf_package(format: Format) -> None:
    sizes = {"Q2_0": (64, 18)} | {kind.name: size for kind, size in oracle.GGML_QUANT_SIZES.items()}
    assert (format.block, format.bytes) == sizes[format.name]
    assert format.id == (42 if format.name == "Q2_0" else oracle.GGMLQuantizationType[format.name])
    assert format.size(7 * format.block) == 7 * format.bytes


@pytest.mark.parametrize("format", FORMATS.values(), ids=repr)
def test_rows_and_pieces_do_not_change_the_result(format: Format) -> None:
    shape = (3, 5, format.block * 2)
    tensor = InMemory(format, shape, random_blocks(format, math.prod(shape) // format.block))
    whole = dequantize(tensor)
    assert whole.shape == shape
    rows = np.concatenate([dequantize_rows(tensor, start, start + 3) for start in range(0, 15, 3)])
    assert same_bits(rows, whole)
    out = np.empty(shape, np.float32)
    assert np.shares_memory(dequantize(tensor, out), out) and same_bits(out, whole)


def test_a_large_tensor_needs_little_more_than_its_result() -> None:
    format = BY_NAME["IQ3_S"]
    data = random_blocks(format, 1 << 13)
    dequantize_blocks(format, data[: format.bytes])  # the codebook is loaded once
    tracemalloc.start()
    try:
        result = dequantize_blocks(format, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.nbytes <= peak < result.nbytes + (2 << 20)


def test_wrong_arguments_are_refused() -> None:
    format = BY_NAME["Q8_0"]
    tensor = InMemory(format, (2, 32), random_blocks(format, 2))
    for start, stop in ((-1, 1), (0, 3), (2, 1)):
        with pytest.raises(ValueError, match="of a tensor of 2 rows"):
            dequantize_rows(tensor, start, stop)
    with pytest.raises(ValueError, match="whole number of Q8_0 blocks"):
        dequantize_blocks(format, tensor.data[:-1])
    for out in (np.empty(63, np.float32), np.empty(64, np.float64), np.empty((64, 2), np.float32)[:, 0]):
        with pytest.raises(ValueError, match="out must be contiguous float32 of 64 weights"):
            dequantize(tensor, out)  # type: ignore[arg-type]


def test_damaged_scales_give_nan_without_a_warning() -> None:
    format = BY_NAME["Q4_0"]
    data = random_blocks(format, 1)
    data[:2] = np.frombuffer(struct.pack("<e", math.inf), np.uint8)
    data[2:] = 0x08
    assert np.isnan(dequantize_blocks(format, data)[:16]).all()


def test_grids_are_the_gguf_package_s() -> None:
    made = make_grids()
    assert grids().keys() == made.keys()
    for name, grid in grids().items():
        assert grid.dtype == np.uint8 and np.array_equal(grid, made[name])


def test_signs() -> None:
    assert signs()[0b10000001].tolist() == [-1, 1, 1, 1, 1, 1, 1, -1]
    assert np.array_equal(even_signs()[:, :7], signs()[:128, :7])
    assert (even_signs().prod(axis=1) == 1).all()
