"""One GGUF file: its header, metadata and tensor infos, each checked before the next is read.

Layout (little endian): magic, u32 version, u64 tensor count, u64 key count; keys (name, u32 type, value); tensor infos (name, u32 number
of dimensions, u64 sizes with the row length first, u32 format, u64 offset into the data section); padding; the data section, which
starts at a multiple of ``general.alignment`` (default 32), as each tensor in it does. Source: gguf.md of ggml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.errors import ModelError
from strata.weights.cursor import DAMAGED, MAX_NAME, Cursor, quoted
from strata.weights.formats import FORMATS, UNSERVED, Format
from strata.weights.mapped import MappedFile

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
KEY_BYTES = 8 + 4 + 1  # the smallest key: empty name, type, one byte
INFO_BYTES = 8 + 4 + 8 + 4 + 8  # the smallest tensor info: empty name, one dimension

# First bytes of files that are often taken for GGUF files, and what to do about them.
STRANGERS = {
    b"version https://git-lfs": "it is a Git LFS pointer; fetch the file itself with `git lfs pull`",
    b"PK\x03\x04": "it looks like a zip or PyTorch file; convert the model to GGUF",
    b"tjgg": "it is a GGJT file, older than GGUF; convert the model again",
    b"<": "it looks like a web page; download the file itself",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor. ``shape`` is in NumPy order: (rows, columns), the last axis contiguous."""

    name: str
    shape: tuple[int, ...]
    type: Format
    file: MappedFile
    start: int

    @property
    def size(self) -> int:
        """Stored bytes."""
        return self.type.size(math.prod(self.shape))

    @property
    def data(self) -> NDArray[np.uint8]:
        """The stored bytes, uint8 [size], read-only and mapped. Raises ModelError if the file has shrunk."""
        return self.file.view(self.start, self.size)


@dataclass(frozen=True, slots=True)
class Shard:
    """A checked file: the whole model, or one part of a split one."""

    file: MappedFile
    metadata: dict[str, object]
    tensors: list[Tensor]


@dataclass(frozen=True, slots=True)
class Info:
    """A tensor info as read: ``at`` is where it starts in the file, ``offset`` is into the data section."""

    name: str
    shape: tuple[int, ...]
    type: Format
    offset: int
    size: int


def read_shard(path: Path) -> Shard:
    """Map and check one file. Raises ModelError."""
    file = MappedFile(path)
    try:
        return parse(file)
    except BaseException:
        file.close()
        raise


def parse(file: MappedFile) -> Shard:
    cursor = Cursor(file)
    tensor_count, key_count = read_header(cursor)
    metadata = read_metadata(cursor, key_count)
    alignment = read_alignment(file.path, metadata)
    infos = read_infos(cursor, tensor_count, alignment)
    start = -(-cursor.at // alignment) * alignment
    check_extents(file, infos, start)
    return Shard(file, metadata, [Tensor(info.name, info.shape, info.type, file, start + info.offset) for info in infos])


def read_header(cursor: Cursor) -> tuple[int, int]:
    """(tensor count, key count)."""
    head = bytes(cursor.file.bytes[:24])
    if head[:4] != b"GGUF":
        hint = next((hint for start, hint in STRANGERS.items() if head.startswith(start)), "give the path of a .gguf file")
        raise ModelError(f"{cursor.file.path}: starts with {head[:4]!r}, expected 'GGUF'; {hint}")
    cursor.at = 4
    version = cursor.u32("version")
    if version not in (2, 3):
        cursor.at = 4
        if version & 0xFFFF == 0 and version:
            cursor.fail("a big-endian GGUF file", "a little-endian one", "convert the model again, without --bigendian")
        cursor.fail(f"GGUF version {version}", "version 2 or 3", "convert the model again with a current converter")
    return cursor.count("tensor count", MAX_TENSORS, INFO_BYTES), cursor.count("key count", MAX_KEYS, KEY_BYTES)


def read_metadata(cursor: Cursor, count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(count):
        name = cursor.string(f"name of key {index}", MAX_NAME)
        if name in metadata:
            cursor.fail(f"key {quoted(name)} a second time", "each key once", "convert the model again")
        kind = cursor.u32(f"type of key {quoted(name)}")
        metadata[name] = cursor.value(kind, f"key {quoted(name)}")
    return metadata


def whole_number(path: Path, metadata: Mapping[str, object], key: str, default: int) -> int:
    """The integer under ``key``. Raises ModelError if it is of another type."""
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{path}: key {key} is a {type(value).__name__}, expected a whole number; convert the model again")
    return value


def read_alignment(path: Path, metadata: Mapping[str, object]) -> int:
    alignment = whole_number(path, metadata, "general.alignment", 32)
    if alignment < 8 or alignment & (alignment - 1):
        raise ModelError(f"{path}: general.alignment is {alignment}, expected a power of two from 8 on; {DAMAGED}")
    return alignment


def read_infos(cursor: Cursor, count: int, alignment: int) -> list[Info]:
    names: set[str] = set()
    infos = []
    for index in range(count):
        name = cursor.string(f"name of tensor {index}", MAX_NAME)
        if name in names:
            cursor.fail(f"tensor {quoted(name)} a second time", "each tensor once", "convert the model again")
        names.add(name)
        infos.append(read_info(cursor, name, alignment))
    return infos


def read_info(cursor: Cursor, name: str, alignment: int) -> Info:
    tensor = f"tensor {quoted(name)}"
    dimensions = cursor.u32(f"number of dimensions of {tensor}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        cursor.fail(f"{tensor} with {dimensions} dimensions", f"1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.u64(f"shape of {tensor}") for _ in range(dimensions))[::-1]
    if 0 in shape:
        cursor.fail(f"{tensor} of shape {shape}", "sizes from 1 on")
    kind = cursor.u32(f"type of {tensor}")
    if kind not in FORMATS:
        known = f" ({UNSERVED[kind]})" if kind in UNSERVED else ""
        served = " ".join(format.name for format in FORMATS.values())
        cursor.fail(f"{tensor} of type {kind}{known}", f"one of {served}", "use a file of these types")
    format = FORMATS[kind]
    if shape[-1] % format.block:
        cursor.fail(f"{tensor} with rows of {shape[-1]} weights", f"a multiple of {format.name}'s block of {format.block}")
    offset = cursor.u64(f"offset of {tensor}")
    if offset % alignment:
        cursor.fail(f"{tensor} with offset {offset}", f"a multiple of the alignment {alignment}", "convert the model again")
    return Info(name, shape, format, offset, format.size(math.prod(shape)))


def check_extents(file: MappedFile, infos: list[Info], start: int) -> None:
    """Every tensor inside the file, none on another's bytes."""
    ends = [start + info.offset + info.size for info in infos]
    needed = max(ends, default=0)
    if needed > file.size:
        first = next(info for info, end in zip(infos, ends) if end > file.size)
        raise ModelError(
            f"{file.path}: tensors up to byte {needed} expected, but the file has {file.size} bytes (first tensor outside: "
            f"{quoted(first.name)}); {DAMAGED}"
        )
    placed = sorted(infos, key=lambda info: info.offset)
    for one, other in zip(placed, placed[1:]):
        if one.offset + one.size > other.offset:
            raise ModelError(
                f"{file.path}: tensor {quoted(one.name)} takes {one.size} bytes from offset {one.offset} ({one.type.name} "
                f"{one.shape}), but {quoted(other.name)} starts at {other.offset}; the file is damaged or uses another layout "
                "of that type, download or convert it again"
            )
