"""Models in several parts: any part opens the whole, and a wrong set of parts is named."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from strata.errors import ModelError
from strata.weights.formats import dequantize
from strata.weights.gguf import GGUFFile
from tests.weights import rawgguf as raw


def part(number: int, count: int, total: int, infos: list[bytes], data: bytes, alignment: int = 32) -> bytes:
    keys = [
        raw.key("split.no", raw.U16, struct.pack("<H", number)),
        raw.key("split.count", raw.U16, struct.pack("<H", count)),
        raw.key("split.tensors.count", raw.I32, struct.pack("<i", total)),
        raw.u32("general.alignment", alignment),
    ]
    if number == 0:
        keys.append(raw.key("general.name", raw.STRING, raw.text("whole")))
    return raw.gguf(keys, infos, data, alignment=alignment)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three parts: the first without tensors, the last with an alignment of its own."""
    contents = [
        part(0, 3, 3, [], b""),
        part(1, 3, 3, [raw.info("a", [2]), raw.info("b", [1], offset=32)], struct.pack("<2f24xf", 1, 2, 3)),
        part(2, 3, 3, [raw.info("c", [1])], struct.pack("<f", 4), alignment=64),
    ]
    return [raw.write(tmp_path / f"m-{number + 1:05d}-of-00003.gguf", content) for number, content in enumerate(contents)]


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_the_whole(parts: list[Path], opened: int) -> None:
    with GGUFFile.open(parts[opened]) as model:
        assert {name: dequantize(tensor).tolist() for name, tensor in model.tensors.items()} == {"a": [1, 2], "b": [3], "c": [4]}
        assert model.metadata["general.name"] == "whole"
        assert model.size == sum(path.stat().st_size for path in parts)


def test_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"3 parts expected, 2 found; missing \('m-00002-of-00003.gguf'\); download the missing"):
        GGUFFile.open(parts[0])


def test_cut_part_is_named_with_both_sizes(parts: list[Path]) -> None:
    content = parts[1].read_bytes()
    parts[1].write_bytes(content[:-10])
    with pytest.raises(ModelError, match=rf"m-00002.*up to byte {len(content)} expected, but the file has {len(content) - 10} bytes"):
        GGUFFile.open(parts[0])


def test_renamed_part(parts: list[Path]) -> None:
    with pytest.raises(ModelError, match="is one of 3 parts .*expected a name that ends in -00001-of-00003.gguf"):
        GGUFFile.open(parts[0].rename(parts[0].with_name("model.gguf")))


def test_swapped_parts(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ModelError, match=r"m-00003-of-00003.gguf: says split.no 1 and split.count 3, expected 2 and 3"):
        GGUFFile.open(parts[0])


def test_part_of_another_model(parts: list[Path]) -> None:
    parts[2].write_bytes(part(2, 3, 3, [raw.info("a", [1])], bytes(4)))
    with pytest.raises(ModelError, match=r"tensor 'a' is also in m-00002-of-00003.gguf"):
        GGUFFile.open(parts[0])
    parts[2].write_bytes(part(2, 3, 3, [], b""))
    with pytest.raises(ModelError, match=r"3 tensors in all parts expected \(split.tensors.count\), 2 found"):
        GGUFFile.open(parts[0])


def test_split_keys_of_a_wrong_type(tmp_path: Path) -> None:
    path = raw.write(tmp_path / "m.gguf", raw.gguf([raw.key("split.count", raw.STRING, raw.text("3"))]))
    with pytest.raises(ModelError, match="split.count is a str, expected a whole number"):
        GGUFFile.open(path)


def test_a_split_count_of_one_is_a_whole_model(tmp_path: Path) -> None:
    with GGUFFile.open(raw.write(tmp_path / "m.gguf", part(0, 1, 1, [raw.info("a", [1])], bytes(4)))) as model:
        assert list(model.tensors) == ["a"]
