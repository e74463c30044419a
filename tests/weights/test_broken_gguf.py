"""Broken and hostile files: one ModelError each, of one line that says what to do, before anything large is allocated."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import pytest

from strata.errors import ModelError
from strata.weights.formats import UNSERVED
from strata.weights.gguf import GGUFFile
from tests.weights import rawgguf as raw
from tests.weights.test_gguf import TINY

HUGE = 2**40
FILLER = bytes(1000)
DATA = 64  # where the data section of a file with one tensor "t" and no keys starts


def refusal(path: Path) -> str:
    """The message with which ``path`` is refused; at most 1 MB may be allocated on the way."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as caught:
            GGUFFile.open(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert peak < 1 << 20, f"{peak} bytes allocated"
    assert message.startswith(str(path)) and "\n" not in message and len(message) < 700
    assert any(verb in message for verb in ("download", "convert", "give", "use", "fetch", "check")), message
    return message


def with_tensor(*infos: bytes, data: bytes = bytes(64), keys: tuple[bytes, ...] = ()) -> bytes:
    return raw.gguf(keys, infos, data)


CASES = {
    "dimension 2^42+1": (with_tensor(raw.info("t", [2**42 + 1])), "up to byte 17592186044484 expected, but the file has 128 bytes"),
    "dimension 2^42+256 of IQ3_S": (with_tensor(raw.info("t", [2**42 + 256], 21)), "first tensor outside: 't'"),
    "n_dims 2^32-1": (with_tensor(raw.info("t", [1], dimensions=2**32 - 1)), "tensor 't' with 4294967295 dimensions .*1 to 4"),
    "n_dims 5": (with_tensor(raw.info("t", [1] * 5)), "with 5 dimensions"),
    "n_dims 0": (with_tensor(raw.info("t", [])), "with 0 dimensions"),
    "product wraps to 0": (with_tensor(raw.info("t", [2**33, 2**31, 1, 1])), f"up to byte {DATA + 32 + 2**66} expected"),
    "offset + size wraps": (with_tensor(raw.info("t", [8], offset=2**64 - 32)), f"up to byte {DATA + 2**64} expected"),
    "size 0": (with_tensor(raw.info("t", [8, 0])), r"tensor 't' of shape \(0, 8\)"),
    "alignment 0": (raw.gguf([raw.u32("general.alignment", 0)]), "general.alignment is 0, expected a power of two from 8"),
    "alignment -1": (raw.gguf([raw.key("general.alignment", raw.I32, b"\xff" * 4)]), "general.alignment is -1"),
    "alignment 2^32-1": (raw.gguf([raw.u32("general.alignment", 2**32 - 1)]), "general.alignment is 4294967295"),
    "alignment 7": (raw.gguf([raw.u32("general.alignment", 7)]), "general.alignment is 7"),
    "alignment 24": (raw.gguf([raw.u32("general.alignment", 24)]), "general.alignment is 24"),
    "alignment text": (raw.gguf([raw.key("general.alignment", raw.STRING, raw.text("32"))]), "is a str, expected a whole number"),
    "alignment bool": (raw.gguf([raw.key("general.alignment", raw.BOOL, b"\1")]), "is a bool, expected a whole number"),
    "offset 40": (with_tensor(raw.info("blk.0.x", [2], offset=40)), "tensor 'blk.0.x' with offset 40 .*multiple of the alignment 32"),
    "offset outside": (with_tensor(raw.info("t", [2], offset=4096)), "but the file has 128 bytes"),
    "string 2^40": (
        raw.gguf([raw.key("k", raw.STRING, raw.text(FILLER, HUGE))]),
        "key 'k' of 1099511627776 bytes at byte 45; expected at most the 1011 bytes left of 1056; the file is damaged",
    ),
    "string 2^64-1": (raw.gguf([raw.key("k", raw.STRING, raw.text(FILLER, 2**64 - 1))]), "key 'k' of 18446744073709551615 bytes"),
    "key name 2^40": (raw.gguf([raw.text(b"k", HUGE) + FILLER]), "name of key 0 of 1099511627776 bytes .*at most 65535"),
    "tensor name 2^40": (raw.gguf([], [raw.text(b"k", HUGE) + FILLER]), "name of tensor 0 of 1099511627776 bytes"),
    "array 2^40": (raw.gguf([raw.key("k", raw.ARRAY, raw.array(raw.U8, HUGE, FILLER))]), "item count of key 'k' is 1099511627776"),
    "array of strings 2^40": (raw.gguf([raw.key("k", raw.ARRAY, raw.array(raw.STRING, HUGE, FILLER))]), "is 1099511627776 .*at most 12"),
    "array of arrays 2^40": (raw.gguf([raw.key("k", raw.ARRAY, raw.array(raw.ARRAY, HUGE, FILLER))]), "is 1099511627776 .*at most 8"),
    "array 2^61 of 8 bytes": (raw.gguf([raw.key("k", raw.ARRAY, raw.array(raw.U64, 2**61, FILLER))]), "is 2305843009213693952"),
    "item 2^40": (
        raw.gguf([raw.key("k", raw.ARRAY, raw.array(raw.STRING, 2, raw.text("a") + raw.text("b", HUGE)))]),
        "string 1 of key 'k' ends 1099511627746 bytes past the end at byte 58",
    ),
    "item cut": (raw.gguf([raw.key("k", raw.ARRAY, raw.array(raw.STRING, 2, raw.text("abcdefgh")))])[:68], "string 1 of key 'k' ends 5"),
    "nested 3 deep": (
        raw.gguf([raw.key("k", raw.ARRAY, raw.array(raw.ARRAY, 1, raw.array(raw.ARRAY, 1, raw.array(raw.U8, 1, b"1"))))]),
        "key 'k' is nested 3 deep",
    ),
    "keys 2^40": (raw.gguf(counts=(0, HUGE)), "key count is 1099511627776"),
    "tensors 2^40": (raw.gguf(counts=(HUGE, 0)), "tensor count is 1099511627776"),
    "tensors 2^64-1": (raw.gguf(counts=(2**64 - 1, 0)), "tensor count is 18446744073709551615"),
    "value type 13": (raw.gguf([raw.key("k", 13, FILLER)]), "key 'k' has the unknown value type 13"),
    "item type 13": (raw.gguf([raw.key("k", raw.ARRAY, raw.array(13, 1, FILLER))]), "key 'k' has the unknown item type 13"),
    "tensor type -1": (with_tensor(raw.info("t", [8], -1)), "tensor 't' of type 4294967295 at byte .*one of F32 F16 BF16 .* IQ4_XS"),
    "tensor type 4": (with_tensor(raw.info("t", [32], 4)), "tensor 't' of type 4 at byte"),
    "row of 31": (with_tensor(raw.info("t", [31, 32], 8)), "tensor 't' with rows of 31 weights .*multiple of Q8_0's block of 32"),
    "twice the key": (raw.gguf([raw.u32("k", 1), raw.u32("k", 1)]), "key 'k' a second time"),
    "twice the tensor": (with_tensor(raw.info("t", [8]), raw.info("t", [8], offset=32)), "tensor 't' a second time"),
    "overlap": (
        with_tensor(raw.info("s", [8], offset=32), raw.info("t", [9])),
        r"tensor 't' takes 36 bytes from offset 0 \(F32 \(9,\)\), but 's' starts at 32",
    ),
    "same place": (with_tensor(raw.info("s", [8]), raw.info("t", [8])), "takes 32 bytes from offset 0 .* starts at 0"),
    "no UTF-8 in a key": (raw.gguf([raw.u32("k", 1).replace(b"k", b"\xff")]), "name of key 0 is no valid UTF-8"),
    "no UTF-8 in a value": (raw.gguf([raw.key("k", raw.STRING, raw.text(b"\xff"))]), "key 'k' is no valid UTF-8"),
    "no UTF-8 in an item": (raw.gguf([raw.key("k", raw.ARRAY, raw.array(raw.STRING, 1, raw.text(b"\xff")))]), "string 0 of key 'k' is no"),
    "name over two lines": (raw.gguf([raw.key("a\nb", 13, b"")]), r"key 'a\\nb' has the unknown"),
    "version 1": (raw.gguf(version=1), "GGUF version 1 .*version 2 or 3; convert the model again with a current converter"),
    "version 4": (raw.gguf(version=4), "GGUF version 4"),
    "version 0": (raw.gguf(version=0), "GGUF version 0"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "a big-endian GGUF file .*expected a little-endian one"),
    "header cut": (raw.gguf()[:14], "tensor count of 8 bytes at byte 8; expected at most the 6 bytes left of 14"),
    "only the magic": (b"GGUF", "version of 4 bytes at byte 4"),
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer; fetch .* `git lfs pull`"),
    "web page": (b"<!DOCTYPE html><html>", "looks like a web page"),
    "PyTorch": (b"PK\x03\x04....", "zip or PyTorch file; convert the model to GGUF"),
    "GGJT": (b"tjgg....", "older than GGUF"),
    "other": (b"\x7fELF", "starts with .*ELF.*expected 'GGUF'"),
    "empty": (b"", "is empty"),
}


@pytest.mark.parametrize("content, message", CASES.values(), ids=CASES.keys())
def test_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = raw.write(tmp_path / "m.gguf", content)
    found = refusal(path)
    with pytest.raises(ModelError, match=message):
        raise ModelError(found)


LIMITS = {
    "tensor count is 65537": raw.gguf(counts=(65_537, 0)),
    "key count is 65537": raw.gguf(counts=(0, 65_537)),
    "item count of key 'k' is 16777217": raw.gguf([raw.key("k", raw.ARRAY, raw.array(raw.U8, 2**24 + 1, b""))]),
    "item count of key 'k' is 65537": raw.gguf([raw.key("k", raw.ARRAY, raw.array(raw.ARRAY, 65_537, b""))]),
}


@pytest.mark.parametrize("message, content", LIMITS.items(), ids=LIMITS.keys())
def test_counts_are_limited_even_if_the_file_is_large_enough(tmp_path: Path, content: bytes, message: str) -> None:
    path = raw.write(tmp_path / "m.gguf", content)
    os.truncate(path, 1 << 25)
    found = refusal(path)
    assert message in found and "(limit " in found


@pytest.mark.parametrize("kind, name", UNSERVED.items())
def test_unserved_type_is_named(tmp_path: Path, kind: int, name: str) -> None:
    message = refusal(raw.write(tmp_path / "m.gguf", with_tensor(raw.info("blk.0.ffn_up.weight", [256], kind))))
    assert f"tensor 'blk.0.ffn_up.weight' of type {kind} ({name})" in message


def test_half_a_download_tells_both_sizes(tmp_path: Path) -> None:
    content = TINY.read_bytes()
    message = refusal(raw.write(tmp_path / "m.gguf", content[: len(content) // 2]))
    assert f"{len(content)} expected" in message and f"the file has {len(content) // 2} bytes" in message
    assert "download it again" in message


def test_last_kilobyte_missing(tmp_path: Path) -> None:
    content = TINY.read_bytes()
    assert f"the file has {len(content) - 1024} bytes" in refusal(raw.write(tmp_path / "m.gguf", content[:-1024]))


def test_no_file_and_no_regular_file(tmp_path: Path) -> None:
    assert "no such file; give the path" in refusal(tmp_path / "absent.gguf")
    assert "is a folder" in refusal(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is no regular file" in refusal(tmp_path / "pipe.gguf")


def test_unreadable_file(tmp_path: Path) -> None:
    path = raw.write(tmp_path / "m.gguf", raw.gguf())
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read every file")
    assert "check its permissions" in refusal(path)
