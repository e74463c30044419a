"""The reader on good files: equal to the ``gguf`` package's reader, and to what was written by hand."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest

from strata.errors import ModelError
from strata.weights.formats import BY_NAME, dequantize
from strata.weights.gguf import GGUFFile
from tests.weights import rawgguf as raw

TINY = Path(__file__).parent.parent / "data" / "tiny" / "llama-iq3s.gguf"


def test_tensors_equal_the_gguf_package() -> None:
    theirs = {tensor.name: tensor for tensor in oracle.GGUFReader(TINY).tensors}
    with GGUFFile.open(TINY) as ours:
        assert list(ours.tensors) == list(theirs)
        for name, tensor in ours.tensors.items():
            assert tensor.shape == tuple(reversed(theirs[name].shape.tolist()))
            assert (tensor.type.id, tensor.size) == (int(theirs[name].tensor_type), theirs[name].n_bytes)
            assert np.array_equal(tensor.data, theirs[name].data.view(np.uint8).reshape(-1))
            expected = oracle.quants.dequantize(theirs[name].data, theirs[name].tensor_type).reshape(tensor.shape)
            assert np.array_equal(dequantize(tensor).view(np.uint32), expected.view(np.uint32))


def test_metadata_equals_the_gguf_package() -> None:
    reader = oracle.GGUFReader(TINY)
    with GGUFFile.open(TINY) as ours:
        assert list(ours.metadata) == [name for name in reader.fields if not name.startswith("GGUF.")]
        for name, value in ours.metadata.items():
            expected = reader.fields[name].contents()
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, name
        assert ours.metadata["general.architecture"] == "llama"
        assert isinstance(ours.metadata["llama.block_count"], int)


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(tmp_path: Path, version: int) -> None:
    numbers = {
        raw.U8: ("B", 255), raw.I8: ("b", -128), raw.U16: ("H", 65535), raw.I16: ("h", -32768), raw.U32: ("I", 2**32 - 1),
        raw.I32: ("i", -(2**31)), raw.F32: ("f", 0.5), raw.U64: ("Q", 2**64 - 1), raw.I64: ("q", -(2**63)), raw.F64: ("d", 0.1),
    }  # fmt: skip
    keys = [raw.key(f"one.{kind}", kind, struct.pack("<" + code, value)) for kind, (code, value) in numbers.items()]
    keys += [
        raw.key(f"many.{kind}", raw.ARRAY, raw.array(kind, 3, struct.pack(f"<3{code}", value, 0, 1)))
        for kind, (code, value) in numbers.items()
    ]
    keys += [
        raw.key("yes", raw.BOOL, b"\1"),
        raw.key("bools", raw.ARRAY, raw.array(raw.BOOL, 3, b"\0\1\1")),
        raw.key("word", raw.STRING, raw.text("naïve\n")),
        raw.key("words", raw.ARRAY, raw.array(raw.STRING, 3, raw.text("a") + raw.text("") + raw.text("Ġb"))),
        raw.key("rows", raw.ARRAY, raw.array(raw.ARRAY, 2, raw.array(raw.U8, 1, b"\7") + raw.array(raw.U8, 0, b""))),
    ]
    with GGUFFile.open(raw.write(tmp_path / "m.gguf", raw.gguf(keys, version=version))) as model:
        found = dict(model.metadata)
    for kind, (code, value) in numbers.items():
        assert found[f"one.{kind}"] == value and type(found[f"one.{kind}"]) is type(value)
        many = found[f"many.{kind}"]
        assert isinstance(many, np.ndarray) and many.dtype == np.dtype("<" + code) and many.tolist() == [value, 0, 1]
    assert found["yes"] is True
    assert found["bools"].tolist() == [False, True, True]  # type: ignore[attr-defined]
    assert (found["word"], found["words"]) == ("naïve\n", ["a", "", "Ġb"])
    assert [row.tolist() for row in found["rows"]] == [[7], []]  # type: ignore[attr-defined]


def test_alignment_and_gaps(tmp_path: Path) -> None:
    """Tensors may lie in any order and with gaps; the data section starts at a multiple of the alignment."""
    data = bytes(128) + struct.pack("<2f", 1, 2) + bytes(120) + struct.pack("<4f", 3, 4, 5, 6)
    content = raw.gguf(
        [raw.u32("general.alignment", 128)], [raw.info("b", [2, 2], offset=256), raw.info("a", [2], offset=128)], data, alignment=128
    )
    with GGUFFile.open(raw.write(tmp_path / "m.gguf", content)) as model:
        assert list(model.tensors) == ["b", "a"]
        assert dequantize(model.tensors["a"]).tolist() == [1, 2]
        assert dequantize(model.tensors["b"]).tolist() == [[3, 4], [5, 6]]
        assert model.tensors["b"].type is BY_NAME["F32"]
        assert model.size == len(content)


def test_data_is_read_only_and_outlives_close() -> None:
    model = GGUFFile.open(TINY)
    tensor = model.tensors["output_norm.weight"]
    data = tensor.data
    before = data.copy()
    with pytest.raises(ValueError):
        data[0] = 1
    model.close()
    model.close()
    assert np.array_equal(data, before)
    with pytest.raises(ValueError, match="closed"):
        tensor.data


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not let a mapped file shrink")
def test_a_file_cut_while_open_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = raw.write(tmp_path / "m.gguf", TINY.read_bytes())
    with GGUFFile.open(path) as model:
        last = list(model.tensors.values())[-1]
        with path.open("r+b") as file:
            file.truncate(100_000)
        with pytest.raises(ModelError, match="1198208 bytes when it was opened and has 100000 now"):
            last.data
        with pytest.raises(ModelError, match="do not write to a model file in use"):
            model.check_size()


def names(model: GGUFFile) -> list[str]:
    return list(model.tensors)


def test_bind() -> None:
    with GGUFFile.open(TINY) as model:
        every = names(model)
        assert list(model.bind(every)) == every
        assert list(model.bind(every[:-1], optional=[every[-1], "absent.weight"])) == every
        with pytest.raises(ModelError, match=r"1 tensors missing \('blk.9.none'\) and 0 unexpected; .*'llama'; convert"):
            model.bind([*every, "blk.9.none"])
        with pytest.raises(ModelError, match=r"0 tensors missing and 1 unexpected \('output_norm.weight'\)"):
            model.bind([name for name in every if name != "output_norm.weight"])


def test_bind_names_the_prefix_of_another_converter(tmp_path: Path) -> None:
    infos = [raw.info(f"model.{name}", [8], offset=32 * place) for place, name in enumerate("abcdefghijkl")]
    with GGUFFile.open(raw.write(tmp_path / "m.gguf", raw.gguf(infos=infos, data=bytes(32 * 12)))) as model:
        with pytest.raises(ModelError) as caught:
            model.bind(list("abcdefghijkl"))
    message = str(caught.value)
    assert "12 tensors missing ('a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 4 more)" in message
    assert "12 unexpected ('model.a'," in message and "every name starts with 'model.'" in message
