"""Random damage to a good file is refused with a ModelError or harmless; it never costs memory or another exception."""

from __future__ import annotations

import struct
import tempfile
import tracemalloc
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata.errors import ModelError
from strata.weights.formats import FORMATS, dequantize
from strata.weights.gguf import GGUFFile
from tests.weights import rawgguf as raw

PEAK_BYTES = 1 << 20


def small_file() -> bytes:
    """A key of every kind and a tensor of every format."""
    keys = [
        raw.key("general.architecture", raw.STRING, raw.text("llama")),
        raw.u32("general.alignment", 32),
        raw.key("a.float", raw.F32, struct.pack("<f", 1e-5)),
        raw.key("a.bool", raw.BOOL, b"\1"),
        raw.key("words", raw.ARRAY, raw.array(raw.STRING, 3, raw.text("ab") + raw.text("") + raw.text("é"))),
        raw.key("numbers", raw.ARRAY, raw.array(raw.I32, 4, struct.pack("<4i", 1, -2, 3, 4))),
        raw.key("rows", raw.ARRAY, raw.array(raw.ARRAY, 2, 2 * raw.array(raw.U16, 1, b"\7\0"))),
    ]
    infos, data = [], b""
    for format in FORMATS.values():
        infos.append(raw.info(f"blk.{format.id}", [format.block, 2], format.id, len(data)))
        data += bytes(place * 37 % 251 for place in range(2 * format.bytes))
        data += bytes(-len(data) % 32)
    return raw.gguf(keys, infos, data)


SMALL = small_file()
HEADER = SMALL.index(b"blk.23") + 64
LAST = 2 * FORMATS[23].bytes
NEEDED = len(SMALL) - -LAST % 32  # without the padding after the last tensor


def open_and_use(content: bytes) -> bool:
    """True if the file opened and every weight could be decoded, False if it was refused; anything else fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        path = raw.write(Path(folder) / "m.gguf", content)
        tracemalloc.start()
        try:
            with GGUFFile.open(path) as model:
                for tensor in model.tensors.values():
                    assert dequantize(tensor).shape == tensor.shape
            return True
        except ModelError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            return False
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < PEAK_BYTES, f"{peak} bytes allocated for a file of {len(content)}"


def test_the_undamaged_file_opens() -> None:
    assert open_and_use(SMALL)


@given(st.integers(0, len(SMALL) - 1))
@example(0)
@example(NEEDED - 1)
@example(NEEDED)
def test_cut_anywhere(length: int) -> None:
    assert open_and_use(SMALL[:length]) == (length >= NEEDED)


@settings(max_examples=300)
@given(st.integers(0, HEADER), st.binary(min_size=1, max_size=8))
def test_bytes_replaced(at: int, patch: bytes) -> None:
    open_and_use(SMALL[:at] + patch + SMALL[at + len(patch) :])


EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


@settings(max_examples=300)
@given(st.integers(0, HEADER), st.sampled_from(EXTREMES))
def test_extreme_numbers(at: int, number: int) -> None:
    """Eight bytes anywhere in the header become a number that wraps, overflows or is negative somewhere."""
    open_and_use(SMALL[:at] + struct.pack("<Q", number) + SMALL[at + 8 :])


@given(st.integers(0, HEADER), st.integers(0, 64), st.binary(max_size=64))
def test_bytes_inserted_and_removed(at: int, removed: int, inserted: bytes) -> None:
    open_and_use(SMALL[:at] + inserted + SMALL[at + removed :])


@given(st.binary(max_size=300), st.booleans())
def test_noise(noise: bytes, magic: bool) -> None:
    assert not open_and_use((b"GGUF\3\0\0\0" if magic else b"") + noise) or noise.startswith(bytes(16))
