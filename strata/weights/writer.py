"""Writes GGUF files: for tools that make, convert or requantise models, and for tests.

Numbers are typed by what they are: a NumPy scalar or array by its dtype; a Python int becomes u32 if it fits, else i32, u64 or i64; a
float f32. The bytes of a tensor are given as stored; nothing is quantised here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from strata.weights.cursor import ARRAY, BOOL, NUMBERS, STRING
from strata.weights.formats import Format

DEFAULT_ALIGNMENT = 32
NUMBER_TYPES = {np.dtype("<" + code): kind for kind, code in NUMBERS.items()}
INTEGERS = ((4, 0, 2**32 - 1), (5, -(2**31), 2**31 - 1), (10, 0, 2**64 - 1), (11, -(2**63), 2**63 - 1))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor to be written: ``shape`` in NumPy order, ``data`` its stored bytes (any dtype, C order)."""

    type: Format
    shape: tuple[int, ...]
    data: NDArray[np.generic]

    def __post_init__(self) -> None:
        if not 1 <= len(self.shape) <= 4 or self.shape[-1] % self.type.block:
            raise ValueError(f"{self.type.name} of shape {self.shape}: 1 to 4 dimensions, rows of whole blocks of {self.type.block}")
        if self.data.nbytes != self.type.size(math.prod(self.shape)):
            raise ValueError(f"{self.type.name} of shape {self.shape} is stored in other than {self.data.nbytes} bytes")


def string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(item: object) -> bytes:
    """A metadata value with its type in front. Raises TypeError for what GGUF cannot hold."""
    if isinstance(item, str):
        return struct.pack("<I", STRING) + string(item)
    if isinstance(item, bool):
        return struct.pack("<I?", BOOL, item)
    if isinstance(item, int):
        for kind, low, high in INTEGERS:
            if low <= item <= high:
                return struct.pack("<I" + NUMBERS[kind], kind, item)
    if isinstance(item, (np.ndarray, np.generic)):
        return typed_numbers(np.asarray(item))
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, Sequence) and all(isinstance(one, str) for one in item):
        return struct.pack("<IIQ", ARRAY, STRING, len(item)) + b"".join(string(one) for one in item)
    raise TypeError(f"no GGUF value: {type(item).__name__} {item!r:.80}")


def typed_numbers(numbers: NDArray[np.generic]) -> bytes:
    """A scalar (no dimensions) or an array (one dimension) of the dtype's GGUF type."""
    kind = NUMBER_TYPES.get(numbers.dtype.newbyteorder("<"))
    if kind is None or numbers.ndim > 1:
        raise TypeError(f"no GGUF value: array of {numbers.dtype} with {numbers.ndim} dimensions")
    items = numbers.astype("<" + NUMBERS[kind]).tobytes()
    if numbers.ndim == 0:
        return struct.pack("<I", kind) + items
    return struct.pack("<IIQ", ARRAY, kind, len(numbers)) + items


def write_gguf(
    path: Path, metadata: Mapping[str, object], tensors: Mapping[str, StoredTensor], alignment: int = DEFAULT_ALIGNMENT
) -> None:
    """Write a version 3 file in the given order, or replace the one at ``path``: a reader never sees half of it.

    ``alignment`` is a power of two from 8 on; another than 32 is added to the metadata.
    """
    if alignment != DEFAULT_ALIGNMENT:
        metadata = {**metadata, "general.alignment": alignment}
    infos, offset = b"", 0
    for name, tensor in tensors.items():
        sizes = tensor.shape[::-1]
        infos += string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, tensor.type.id, offset)
        offset += padded(tensor.data.nbytes, alignment)
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, item in metadata.items():
            file.write(string(key) + value(item))
        file.write(infos)
        pad(file, alignment)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.data).data)
            pad(file, alignment)
    unfinished.replace(path)


def padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(padded(file.tell(), alignment) - file.tell()))
