"""A model file is described, or refused in one line that names the fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.engine.families import read_config
from strata.engine.rope import Rope, RopeConfig, interleave
from strata.errors import ModelError
from strata.weights.gguf import GGUFFile
from strata.weights.writer import StoredTensor, write_gguf
from tests.engine.running import GOLDEN

QWEN3 = next(path for path in GOLDEN if path.stem == "qwen3")


def changed(folder: Path, change: Callable[[dict[str, Any], dict[str, StoredTensor]], None]) -> GGUFFile:
    """The qwen3 golden model with its metadata and tensors changed."""
    with GGUFFile.open(QWEN3) as file:
        metadata = {key: value for key, value in file.metadata.items() if not key.startswith("tokenizer.")}
        tensors = {name: StoredTensor(tensor.type, tensor.shape, tensor.data) for name, tensor in file.tensors.items()}
        change(metadata, tensors)
        write_gguf(folder / "changed.gguf", metadata, tensors)
    return GGUFFile.open(folder / "changed.gguf")


def test_a_description() -> None:
    with GGUFFile.open(QWEN3) as file:
        config = read_config(file)
    assert (config.num_layers, config.width, config.ffn_width, config.vocab_size) == (2, 64, 128, 512)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.group) == (4, 2, 32, 2)
    assert (config.context, config.tied, config.rope.interleaved, config.rope.dims) == (128, False, False, 32)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", "mamba", "architecture 'mamba' is not served; served are llama, qwen2, qwen3"),
        ("qwen3.expert_count", 8, "experts"),
        ("qwen3.block_count", 3, "blk.2.attn_norm.weight"),
        ("qwen3.embedding_length", 72, "output.weight is (512, 64), expected (512, 72)"),
        ("qwen3.attention.head_count_kv", 3, "4 heads over 3 KV heads"),
        ("qwen3.attention.head_count_kv", np.array([2, 2], np.int32), "head_count_kv is not one number"),
        ("qwen3.attention.value_length", 16, "different widths"),
        ("qwen3.rope.scaling.type", "longrope", "'longrope'"),
        ("qwen3.rope.dimension_count", 34, "34 of 32 dimensions"),
        ("qwen3.feed_forward_length", "wide", "feed_forward_length is not one number"),
        ("qwen3.context_length", 0, "context_length is 0, expected a whole number"),
        ("qwen3.attention.head_count", None, "has no qwen3.attention.head_count"),
    ],
)
def test_bad_metadata_is_named(tmp_path: Path, key: str, value: object, words: str) -> None:
    def change(metadata: dict[str, Any], _: dict[str, StoredTensor]) -> None:
        metadata.pop(key, None)
        if value is not None:
            metadata[key] = value

    with changed(tmp_path, change) as file, pytest.raises(ModelError) as refusal:
        read_config(file)
    assert words in str(refusal.value) and "changed.gguf" in str(refusal.value) and "\n" not in str(refusal.value)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    def change(_: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
        tensors["blk.0.attn_sinks.weight"] = tensors.pop("blk.1.attn_q_norm.weight")

    with changed(tmp_path, change) as file, pytest.raises(ModelError) as refusal:
        read_config(file)
    assert "blk.1.attn_q_norm.weight" in str(refusal.value) and "blk.0.attn_sinks.weight" in str(refusal.value)


def test_a_misshapen_norm_is_named(tmp_path: Path) -> None:
    def change(_: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
        tensors["blk.0.attn_norm.weight"] = tensors["blk.0.attn_q_norm.weight"]

    with changed(tmp_path, change) as file, pytest.raises(ModelError, match=r"attn_norm.weight is \(32,\), expected \(64,\)"):
        read_config(file)


def test_the_older_key_of_linear_scaling(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], _: dict[str, StoredTensor]) -> None:
        metadata["qwen3.rope.scale_linear"] = 4.0

    with changed(tmp_path, change) as file:
        rope = read_config(file).rope
    assert (rope.scaling, rope.factor) == ("linear", 4.0)


def test_partial_rope_turns_the_first_dimensions_only() -> None:
    """Against the textbook form with halves: x1 cos - x2 sin, x2 cos + x1 sin."""
    config = RopeConfig(base=100.0, dims=8, interleaved=False)
    x = np.random.default_rng(0).standard_normal(12).astype(np.float32)
    angles = 7 * 100.0 ** (-np.arange(4) / 4)
    first, second = x[:4], x[4:8]
    expected = np.concatenate([first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles), x[8:]])
    paired = interleave(x, 12, config).reshape(1, 1, 12).copy()
    pairs = paired[..., :8].view(np.complex64)
    pairs *= Rope(config).turns(np.array([7]))
    np.testing.assert_allclose(paired[0, 0], interleave(expected.astype(np.float32), 12, config), atol=1e-6)


def test_rope_stays_exact_at_far_positions() -> None:
    """float32 angles would be off by 1e-2 at position 250,000."""
    turns = Rope(RopeConfig(base=1e6, dims=4, interleaved=True)).turns(np.array([250_000]))[0, 0]
    exact = SimpleNamespace(fast=np.exp(1j * 250_000.0), slow=np.exp(1j * 250.0))
    np.testing.assert_allclose(turns, [exact.fast, exact.slow], atol=1e-6)
