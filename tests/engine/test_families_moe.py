"""Files of models with experts and draft blocks are described, or refused in one line that names the fault."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from strata.engine.architecture import ExpertConfig
from strata.engine.families import ModelConfig, read_config
from strata.errors import ModelError
from strata.weights.gguf import GGUFFile
from strata.weights.writer import StoredTensor, write_gguf
from tests.engine.running import MOE

QWEN3MOE, GLM4MOE = MOE[:2]
Change = Callable[[dict[str, Any], dict[str, StoredTensor]], None]


def described(folder: Path, model: Path, change: Change) -> ModelConfig:
    """The configuration of a fixture with its metadata and tensors changed."""
    with GGUFFile.open(model) as file:
        metadata = {key: value for key, value in file.metadata.items() if not key.startswith("tokenizer.")}
        tensors = {name: StoredTensor(tensor.type, tensor.shape, tensor.data) for name, tensor in file.tensors.items()}
        change(metadata, tensors)
        write_gguf(folder / "changed.gguf", metadata, tensors)
    with GGUFFile.open(folder / "changed.gguf") as file:
        return read_config(file)


def test_descriptions() -> None:
    with GGUFFile.open(QWEN3MOE) as file:
        config = read_config(file)
    assert config.experts == ExpertConfig(8, 2, 256, 0, 0, "softmax", True, 1.0, 1, 1)
    assert (config.num_layers, config.mtp_blocks, config.mtp_promised, config.routed(0)) == (4, (), 0, True)
    with GGUFFile.open(GLM4MOE) as file:
        config = read_config(file)
    assert config.experts == ExpertConfig(8, 2, 256, 256, 1, "sigmoid", True, 1.0, 1, 1)
    assert (config.num_layers, config.mtp_blocks, config.mtp_promised) == (4, (4,), 1)
    assert [config.routed(block) for block in range(5)] == [False, True, True, True, True]
    assert (config.rope.dims, config.head_dim, config.rope.interleaved, config.ffn_width) == (32, 64, False, 512)


def without_keys(*keys: str) -> Change:
    def change(metadata: dict[str, Any], _: dict[str, StoredTensor]) -> None:
        for key in keys:
            del metadata[key]

    return change


def test_what_a_silent_file_means(tmp_path: Path) -> None:
    config = described(tmp_path, GLM4MOE, without_keys(
        "glm4moe.expert_gating_func", "glm4moe.expert_weights_norm", "glm4moe.expert_weights_scale", "glm4moe.expert_group_count",
    ))
    assert config.experts == ExpertConfig(8, 2, 256, 256, 1, "sigmoid", False, 1.0, 1, 1)
    config = described(tmp_path, QWEN3MOE, without_keys("qwen3moe.feed_forward_length"))
    assert config.ffn_width == 256


@pytest.mark.parametrize("block_count", [4, 5])
def test_a_head_is_found_where_no_key_tells_of_it(tmp_path: Path, block_count: int) -> None:
    def change(metadata: dict[str, Any], _: dict[str, StoredTensor]) -> None:
        del metadata["glm4moe.nextn_predict_layers"]
        metadata["glm4moe.block_count"] = block_count

    config = described(tmp_path, GLM4MOE, change)
    assert (config.num_layers, config.mtp_blocks, config.mtp_promised) == (4, (4,), 0)


@pytest.mark.parametrize("left", ["", "attn", "nextn.enorm"])
def test_a_promised_head_that_is_absent_leaves_a_model_without(tmp_path: Path, left: str) -> None:
    """All of its block gone, or parts of it left."""

    def change(_: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
        for name in [name for name in tensors if name.startswith("blk.4.") and not (left and left in name)]:
            del tensors[name]

    config = described(tmp_path, GLM4MOE, change)
    assert (config.num_layers, config.mtp_blocks, config.mtp_promised) == (4, (), 1)


@pytest.mark.parametrize(
    ("model", "key", "value", "words"),
    [
        (QWEN3MOE, "expert_gating_func", 3, "with gating function 3 is not served"),
        (QWEN3MOE, "expert_count", None, "has no qwen3moe.expert_count"),
        (QWEN3MOE, "expert_count", 16, "is (8, 256, 256), expected (16, 256, 256)"),
        (QWEN3MOE, "expert_used_count", 9, "9 of 8 experts"),
        (QWEN3MOE, "expert_feed_forward_length", 128, "expected (8, 256, 128)"),
        (GLM4MOE, "expert_group_count", 3, "8 experts in 1 of 3 groups"),
        (GLM4MOE, "expert_group_used_count", 2, "in 2 of 1 groups"),
        (GLM4MOE, "expert_weights_norm", 1, "expert_weights_norm is neither true nor false"),
        (GLM4MOE, "expert_shared_count", 2, "expected (256, 512)"),
        (GLM4MOE, "leading_dense_block_count", 0, "blk.0.ffn_gate_inp.weight"),
        (GLM4MOE, "nextn_predict_layers", 5, "5 blocks, 5 of them for drafts"),
        (GLM4MOE, "block_count", 6, "those found are [4]"),
        (QWEN3MOE, "block_count", 2**31 - 1, "block_count is 2147483647, and the file has 51 tensors"),
        (QWEN3MOE, "block_count", 2**40, "block_count is 1.099511628e+12, expected a whole number from 1 to 2147483647"),
        (QWEN3MOE, "expert_used_count", math.inf, "expert_used_count is inf, expected a finite number"),
        (QWEN3MOE, "attention.layer_norm_rms_epsilon", math.nan, "epsilon is nan, expected a finite number"),
        (QWEN3MOE, "rope.freq_base", 0.0, "freq_base is 0.0, expected a number above 0"),
        (GLM4MOE, "expert_gating_func", 1.5, "expert_gating_func is 1.5, expected a whole number from 0"),
        (GLM4MOE, "leading_dense_block_count", -1, "leading_dense_block_count is -1, expected a whole number from 0"),
        (GLM4MOE, "nextn_predict_layers", -1, "nextn_predict_layers is -1"),
    ],
)
def test_bad_metadata_is_named(tmp_path: Path, model: Path, key: str, value: object, words: str) -> None:
    def change(metadata: dict[str, Any], _: dict[str, StoredTensor]) -> None:
        name = f"{metadata['general.architecture']}.{key}"
        metadata.pop(name, None)
        if value is not None:
            metadata[name] = value

    with pytest.raises(ModelError) as refusal:
        described(tmp_path, model, change)
    assert words in str(refusal.value) and "changed.gguf" in str(refusal.value) and "\n" not in str(refusal.value)


VALUES = [
    math.nan, math.inf, -math.inf, -1, 0, 0.5, 1, 2, 3, 7, 65, 2**31, 2**63, 1e308, True, "x", "", np.array([1, 2], np.int32), ["a"], [],
]  # fmt: skip
SILENT = (
    "expert_group_count", "expert_group_used_count", "rope.scaling.type", "rope.scale_linear", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor", "attention.value_length",
)  # fmt: skip


def test_whatever_a_key_says_the_file_is_described_or_refused() -> None:
    """Keys that the model has and keys that it could have, one after the other; without a warning of NumPy's, too."""
    with GGUFFile.open(GLM4MOE) as file:
        given, refused = dict(file.metadata), 0
        names = [key for key in given if key.startswith("glm4moe.")] + [f"glm4moe.{key}" for key in SILENT] + ["general.architecture"]
        for key in names:
            for value in VALUES:
                file.metadata = MappingProxyType({**given, key: value})
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")
                        config = read_config(file)
                except ModelError as refusal:
                    assert "\n" not in str(refusal)
                    refused += 1
                else:
                    assert not isinstance(value, float) or math.isfinite(value), key
                    assert config.vocab_size == 512
    assert refused > 400


@pytest.mark.parametrize("number", ["\N{SUPERSCRIPT TWO}", "04", "4" * 5000, "x"])
def test_a_block_with_no_number_is_no_block(tmp_path: Path, number: str) -> None:
    def change(_: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
        tensors[f"blk.{number}.nextn.eh_proj.weight"] = tensors["blk.4.nextn.eh_proj.weight"]

    with pytest.raises(ModelError, match=r"0 tensors missing and 1 unexpected"):
        described(tmp_path, GLM4MOE, change)


def test_heads_follow_each_other(tmp_path: Path) -> None:
    def change(_: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
        for name in [name for name in tensors if name.startswith("blk.4.")]:
            tensors[name.replace("blk.4.", "blk.6.")] = tensors[name]

    with pytest.raises(ModelError, match=r"those found are \[4, 6\]"):
        described(tmp_path, GLM4MOE, change)


@pytest.mark.parametrize(
    "name", ["blk.1.exp_probs_b.bias", "blk.2.ffn_up_shexp.weight", "blk.4.nextn.hnorm.weight", "blk.3.attn_k_norm.weight"]
)
def test_missing_tensors_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=name.split(".")[-2]):
        described(tmp_path, GLM4MOE, lambda _, tensors: tensors.pop(name) and None)


def test_norms_of_q_and_k_may_both_be_absent(tmp_path: Path) -> None:
    def change(_: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
        for name in [name for name in tensors if "attn_q_norm" in name or "attn_k_norm" in name]:
            del tensors[name]

    assert described(tmp_path, GLM4MOE, change).num_layers == 4


def test_a_dense_family_with_experts_is_refused(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], _: dict[str, StoredTensor]) -> None:
        for key in [key for key in metadata if key.startswith("qwen3moe.")]:
            metadata[key.replace("qwen3moe.", "llama.")] = metadata.pop(key)
        metadata["general.architecture"] = "llama"

    with pytest.raises(ModelError, match="a llama with experts is not served"):
        described(tmp_path, QWEN3MOE, change)
