"""GGUF bytes by hand, right or wrong in any field: written from the format's description, not with strata's writer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def text(content: bytes | str, length: int | None = None) -> bytes:
    """A string; ``length`` lies about it."""
    content = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(content) if length is None else length) + content


def key(name: bytes | str, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def u32(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def array(kind: int, count: int, payload: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def info(name: bytes | str, sizes: Sequence[int], kind: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    """A tensor info; ``sizes`` with the row length first; ``dimensions`` lies about their number."""
    count = len(sizes) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", count, *sizes, kind % 2**32, offset)


def gguf(
    keys: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file; ``counts`` (tensors, keys) lies about their numbers."""
    tensors, entries = counts or (len(infos), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
