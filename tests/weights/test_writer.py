"""The writer, read back by the ``gguf`` package's reader and by ours."""

from __future__ import annotations

from pathlib import Path

import gguf as oracle
import numpy as np
import pytest

from strata.weights.formats import BY_NAME, dequantize
from strata.weights.gguf import GGUFFile
from strata.weights.writer import StoredTensor, write_gguf

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "a.small": 7, "a.negative": -7, "a.large": 2**40, "a.most": 2**64 - 1, "a.least": -(2**63),
    "a.float": 0.5, "a.double": np.float64(0.1), "a.byte": np.uint8(255), "a.yes": True, "a.no": np.bool_(False),
    "words": ["a", "", "Ġb"], "scores": np.array([0.5, -1], np.float32), "kinds": np.array([1, 3], np.int32),
}  # fmt: skip


def plain(value: object) -> object:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


@pytest.mark.parametrize("alignment", [32, 128])
def test_round_trip(tmp_path: Path, alignment: int) -> None:
    floats = np.arange(6, dtype=np.float32).reshape(2, 3)
    bits = np.random.default_rng(0).integers(0, 0x70, 4 * 110, dtype=np.uint8)
    tensors = {"norm": StoredTensor(BY_NAME["F32"], (2, 3), floats), "q": StoredTensor(BY_NAME["IQ3_S"], (2, 512), bits)}
    path = tmp_path / "m.gguf"
    write_gguf(path, METADATA, tensors, alignment)
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]
    reader = oracle.GGUFReader(path)
    with GGUFFile.open(path) as model:
        assert list(model.tensors) == [tensor.name for tensor in reader.tensors] == ["norm", "q"]
        assert np.array_equal(dequantize(model.tensors["norm"]), floats)
        assert np.array_equal(model.tensors["q"].data, bits)
        for name, value in METADATA.items():
            assert plain(model.metadata[name]) == plain(value) == reader.fields[name].contents(), name
    assert reader.alignment == alignment
    assert np.array_equal(reader.tensors[0].data, floats) and np.array_equal(reader.tensors[1].data.reshape(-1), bits)


@pytest.mark.parametrize("value", [None, 2**64, -(2**63) - 1, {"a": 1}, [1, 2], np.zeros((2, 2)), np.zeros(2, np.complex64)])
def test_what_gguf_cannot_hold(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match="no GGUF value"):
        write_gguf(tmp_path / "m.gguf", {"k": value}, {})
    assert not (tmp_path / "m.gguf").exists()


def test_tensors_of_a_wrong_size() -> None:
    with pytest.raises(ValueError, match="other than 12 bytes"):
        StoredTensor(BY_NAME["F32"], (4,), np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="whole blocks of 32"):
        StoredTensor(BY_NAME["Q8_0"], (31,), np.zeros(34, np.uint8))
    with pytest.raises(ValueError, match="1 to 4 dimensions"):
        StoredTensor(BY_NAME["F32"], (1,) * 5, np.zeros(1, np.float32))
