"""The stored number formats: their ggml ids, block sizes and byte layouts, and the way back to float32.

A tensor row is a whole number of blocks; a block holds ``block`` weights in ``bytes`` bytes, laid out as the format's named
structured dtype says. Decoding goes in pieces of a few thousand blocks, whose temporaries stay in a cache: the speed of one core is
then about 2 ns a weight, and a large tensor needs no memory beyond its result. Pieces do not change the result.

Why not the ``gguf`` package: it lacks Q2_0, needs several times the memory of its result, and is not needed at run time otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from strata.weights import iquants, kquants, plain
from strata.weights.plain import Blocks, Floats

PIECE_WEIGHTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Format:
    """One stored format: ``block`` weights per block of ``dtype`` (a structured dtype), ``id`` as in a GGUF tensor info."""

    name: str
    id: int
    block: int
    dtype: np.dtype[np.void]
    decode: Callable[[Blocks, Floats], None]

    @property
    def bytes(self) -> int:
        """Bytes of one block."""
        return self.dtype.itemsize

    def size(self, weights: int) -> int:
        """Bytes of ``weights`` weights, which must be a multiple of ``block``."""
        return weights // self.block * self.bytes

    def __repr__(self) -> str:
        return self.name


class Stored(Protocol):
    """What a tensor must tell to be decoded (gguf.Tensor does)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> Format: ...
    @property
    def data(self) -> NDArray[np.uint8]: ...


FORMATS: dict[int, Format] = {
    format.id: format
    for format in (
        Format("F32", 0, 1, plain.F32, plain.decode_f32),
        Format("F16", 1, 1, plain.F16, plain.decode_f16),
        Format("BF16", 30, 1, plain.BF16, plain.decode_bf16),
        Format("Q4_0", 2, 32, plain.Q4_0, plain.decode_q4_0),
        Format("Q4_1", 3, 32, plain.Q4_1, plain.decode_q4_1),
        Format("Q5_0", 6, 32, plain.Q5_0, plain.decode_q5_0),
        Format("Q5_1", 7, 32, plain.Q5_1, plain.decode_q5_1),
        Format("Q8_0", 8, 32, plain.Q8_0, plain.decode_q8_0),
        Format("Q2_0", 42, 64, plain.Q2_0, plain.decode_q2_0),
        Format("Q2_K", 10, 256, kquants.Q2_K, kquants.decode_q2_k),
        Format("Q3_K", 11, 256, kquants.Q3_K, kquants.decode_q3_k),
        Format("Q4_K", 12, 256, kquants.Q4_K, kquants.decode_q4_k),
        Format("Q5_K", 13, 256, kquants.Q5_K, kquants.decode_q5_k),
        Format("Q6_K", 14, 256, kquants.Q6_K, kquants.decode_q6_k),
        Format("IQ2_XXS", 16, 256, iquants.IQ2_XXS, iquants.decode_iq2_xxs),
        Format("IQ2_XS", 17, 256, iquants.IQ2_XS, iquants.decode_iq2_xs),
        Format("IQ2_S", 22, 256, iquants.IQ2_S, iquants.decode_iq2_s),
        Format("IQ3_XXS", 18, 256, iquants.IQ3_XXS, iquants.decode_iq3_xxs),
        Format("IQ3_S", 21, 256, iquants.IQ3_S, iquants.decode_iq3_s),
        Format("IQ4_NL", 20, 32, iquants.IQ4_NL, iquants.decode_iq4_nl),
        Format("IQ4_XS", 23, 256, iquants.IQ4_XS, iquants.decode_iq4_xs),
    )
}

BY_NAME: dict[str, Format] = {format.name: format for format in FORMATS.values()}

# Formats that ggml knows and Strata does not serve: named in the refusal.
UNSERVED: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 19: "IQ1_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


def dequantize_blocks(format: Format, data: NDArray[np.uint8], out: Floats | None = None) -> Floats:
    """Whole blocks, uint8 [n * format.bytes] (any shape, contiguous), as float32 [n * format.block].

    ``out``, if given, is contiguous float32 of that many weights (any shape) and is filled and returned flat.
    Raises ValueError for bytes that are no whole number of blocks, or an ``out`` of another size.
    """
    count, rest = divmod(data.size, format.bytes)
    if rest or data.dtype != np.uint8:
        raise ValueError(f"{data.size} bytes of {data.dtype} are no whole number of {format.name} blocks of {format.bytes} bytes")
    blocks = data.reshape(-1).view(format.dtype)
    if out is None:
        out = np.empty(count * format.block, dtype=np.float32)
    elif out.size != count * format.block or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"out must be contiguous float32 of {count * format.block} weights, not {out.dtype} {out.shape}")
    weights = out.reshape(count, format.block)
    step = PIECE_WEIGHTS // format.block
    # A damaged scale (infinite times zero) is the forward pass's to report: it ends a request with a NaN row.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, count, step):
            format.decode(blocks[start : start + step], weights[start : start + step])
    return out.reshape(-1)


def dequantize(tensor: Stored, out: Floats | None = None) -> Floats:
    """A whole tensor as float32 of ``tensor.shape``; ``out`` as in dequantize_blocks."""
    return dequantize_blocks(tensor.type, tensor.data, out).reshape(tensor.shape)


def dequantize_rows(tensor: Stored, start: int, stop: int, out: Floats | None = None) -> Floats:
    """Rows start .. stop - 1 of the tensor seen as [rows, last axis]: float32 [stop - start, tensor.shape[-1]].

    For loading a large tensor piece by piece. Raises ValueError out of range.
    """
    columns = tensor.shape[-1]
    rows = math.prod(tensor.shape[:-1])
    if not 0 <= start <= stop <= rows:
        raise ValueError(f"rows {start}..{stop} of a tensor of {rows} rows")
    row_bytes = tensor.type.size(columns)
    piece: NDArray[Any] = tensor.data[start * row_bytes : stop * row_bytes]
    return dequantize_blocks(tensor.type, piece, out).reshape(stop - start, columns)
