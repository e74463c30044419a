"""Reads GGUF's basic values from bytes nobody vouches for.

The rule: nothing is read, sliced or allocated before its length has been compared with the bytes that are left, in Python
integers, which do not wrap. A count is compared as count times the smallest size of one item. So what a hostile header can
make us allocate is bounded by a small multiple of the file's own size.

Every failure is a ModelError of one line: file, what was found and where, what was expected, what to do.
"""

from __future__ import annotations

import struct
from typing import NoReturn

import numpy as np

from strata.errors import ModelError
from strata.weights.mapped import MappedFile

DAMAGED = "the file is damaged or cut off, download it again"

# GGUF value type -> struct code, the same letter as a NumPy dtype. Source: gguf.md of ggml.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9

MAX_NAME = 65_535  # bytes of a key or tensor name (the specification's limit for keys)
MAX_ITEMS = 1 << 24  # items of an array; the largest vocabularies have under half a million
MAX_NESTED = 1 << 16  # arrays inside one array: each costs more memory than its bytes
MAX_DEPTH = 2  # arrays of arrays, no deeper


def quoted(text: str) -> str:
    """A name out of a file, fit for a message: escaped, so that it stays one line, and not too long."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")


class Cursor:
    """A position in a mapped file. Each method reads what it names, checks it, and moves on."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.at = 0

    @property
    def left(self) -> int:
        return self.file.size - self.at

    def fail(self, found: str, expected: str, remedy: str = DAMAGED) -> NoReturn:
        raise ModelError(f"{self.file.path}: {found} at byte {self.at}; expected {expected}; {remedy}")

    def need(self, count: int, what: str) -> None:
        """Fail unless ``count`` bytes are left."""
        if count > self.left:
            self.fail(f"{what} of {count} bytes", f"at most the {self.left} bytes left of {self.file.size}")

    def number(self, kind: int, what: str) -> int | float | bool:
        code = "<" + NUMBERS[kind]
        size = struct.calcsize(code)
        self.need(size, what)
        (value,) = struct.unpack_from(code, self.file.bytes, self.at)
        self.at += size
        number: int | float | bool = value
        return number

    def u32(self, what: str) -> int:
        return int(self.number(4, what))

    def u64(self, what: str) -> int:
        return int(self.number(10, what))

    def count(self, what: str, limit: int, item_bytes: int) -> int:
        """A u64 count of things of at least ``item_bytes`` bytes each, at most ``limit``."""
        start = self.at
        count = self.u64(what)
        fits = min(limit, self.left // item_bytes)
        if count > fits:
            self.at = start
            self.fail(f"{what} is {count}", f"at most {fits} (limit {limit}, {self.left} bytes left)")
        return count

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.u64(f"length of {what}")
        if limit is not None and length > limit:
            self.fail(f"{what} of {length} bytes", f"at most {limit}")
        self.need(length, what)
        start = self.at
        self.at += length
        try:
            return self.file.bytes[start : self.at].decode()
        except UnicodeDecodeError:
            self.at = start
            self.fail(f"{what} is no valid UTF-8", "text", "convert the model again")

    def value(self, kind: int, what: str, depth: int = 0) -> object:
        """A value of GGUF type ``kind``: int, float, bool, str, NumPy array, list of str, or list of arrays."""
        if kind in NUMBERS:
            return self.number(kind, what)
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self.array(what, depth + 1)
        self.fail(f"{what} has the unknown value type {kind}", "0 to 12")

    def array(self, what: str, depth: int) -> object:
        if depth > MAX_DEPTH:
            self.fail(f"{what} is nested {depth} deep", f"arrays nested at most {MAX_DEPTH} deep", "convert the model again")
        kind = self.u32(f"item type of {what}")
        if kind in NUMBERS:
            return self.numbers(kind, what)
        if kind == STRING:
            return self.strings(self.count(f"item count of {what}", MAX_ITEMS, 8), what)
        if kind == ARRAY:
            return [self.array(what, depth + 1) for _ in range(self.count(f"item count of {what}", MAX_NESTED, 12))]
        self.fail(f"{what} has the unknown item type {kind}", "0 to 12")

    def numbers(self, kind: int, what: str) -> object:
        """An array of numbers, copied, so that it outlives the mapping."""
        dtype = np.dtype("B" if kind == BOOL else "<" + NUMBERS[kind])
        count = self.count(f"item count of {what}", MAX_ITEMS, dtype.itemsize)
        items = np.frombuffer(self.file.bytes, dtype=dtype, count=count, offset=self.at).copy()
        self.at += count * dtype.itemsize
        return items != 0 if kind == BOOL else items

    def strings(self, count: int, what: str) -> list[str]:
        """``count`` strings. Vocabularies pass here: one tight loop, with the same two checks per string as ``string``."""
        data, size, at = self.file.bytes, self.file.size, self.at
        length_at = struct.Struct("<Q").unpack_from
        items = []
        for index in range(count):
            end = at + 8
            if end <= size:
                end += length_at(data, at)[0]
            if end > size:
                self.at = at
                self.fail(f"string {index} of {what} ends {end - size} bytes past the end", f"{count} strings in {size} bytes")
            try:
                items.append(data[at + 8 : end].decode())
            except UnicodeDecodeError:
                self.at = at
                self.fail(f"string {index} of {what} is no valid UTF-8", "text", "convert the model again")
            at = end
        self.at = at
        return items
