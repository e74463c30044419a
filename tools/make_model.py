"""Writes a model of random weights in the shape asked for: to measure and try architectures whose real models are too large.

``python tools/make_model.py OUT.gguf [--family qwen3moe] [--layers 8] [--width 1024] ...``. Matrices are IQ3_S, each weight's root mean
square 1 / sqrt(columns), so that activations stay near 1; norms are ones, biases zeros, routers random. The vocabulary and its tokens
are those of the fixtures (tests/data/tiny), so that the file can be served, though not understood.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from strata.engine.architecture import FAMILIES, ExpertConfig, ModelConfig  # noqa: E402
from strata.engine.families import read_config  # noqa: E402
from strata.engine.rope import RopeConfig  # noqa: E402
from strata.engine.tensor_names import shape_of, tensor_names  # noqa: E402
from strata.weights.formats import BY_NAME  # noqa: E402
from strata.weights.gguf import GGUFFile  # noqa: E402
from strata.weights.writer import StoredTensor, write_gguf  # noqa: E402
from tools._random_weights import random_blocks  # noqa: E402

TOKENIZER = ROOT / "tests" / "data" / "tiny" / "llama-iq3s.gguf"
VOCABULARY = 512
HEAD = 64


def configuration(wanted: argparse.Namespace) -> ModelConfig:
    family = FAMILIES[wanted.family]
    experts = None
    if family.gate:
        shared = wanted.inner if family.name == "glm4moe" else 0
        experts = ExpertConfig(wanted.experts, wanted.used, wanted.inner, shared, wanted.dense, family.gate, True, 1.0, 1, 1)
    heads = wanted.width // HEAD
    return ModelConfig(
        family=family, num_layers=wanted.layers, width=wanted.width, ffn_width=wanted.ffn, vocab_size=VOCABULARY, num_heads=heads,
        num_kv_heads=max(1, heads // 4), head_dim=HEAD, eps=1e-6, context=4096, rope=RopeConfig(1e6, HEAD, family.interleaved),
        tied=False, experts=experts,
    )  # fmt: skip


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    """What read_config makes ``config`` of."""
    numbers: dict[str, Any] = {
        "block_count": config.num_layers, "embedding_length": config.width, "feed_forward_length": config.ffn_width,
        "attention.head_count": config.num_heads, "attention.head_count_kv": config.num_kv_heads, "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.eps, "context_length": config.context, "rope.freq_base": config.rope.base,
    }  # fmt: skip
    if config.experts is not None:
        experts = config.experts
        numbers |= {
            "expert_count": experts.count, "expert_used_count": experts.used, "expert_feed_forward_length": experts.width,
            "expert_shared_count": experts.shared_width // experts.width, "leading_dense_block_count": experts.dense_layers,
            "expert_weights_norm": experts.normalised,
        }  # fmt: skip
    name = config.family.name
    return {"general.architecture": name, "general.name": "random weights", **{f"{name}.{key}": each for key, each in numbers.items()}}


def tensor(name: str, shape: tuple[int, ...]) -> StoredTensor:
    if len(shape) > 1 and "ffn_gate_inp" not in name:
        blocks = random_blocks(math.prod(shape[:-1]), shape[-1])
        return StoredTensor(blocks.type, shape, blocks.data)
    if len(shape) > 1:
        values = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32) / np.float32(math.sqrt(shape[-1]))
    else:
        values = np.full(shape, float(name.endswith("weight")), np.float32)
    return StoredTensor(BY_NAME["F32"], shape, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=list(FAMILIES), default="qwen3moe")
    sizes = {"layers": 8, "width": 1024, "ffn": 2048, "experts": 32, "used": 4, "inner": 512, "dense": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    wanted = parser.parse_args()
    config = configuration(wanted)
    with GGUFFile.open(TOKENIZER) as file:
        tokens = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    names = [*tensor_names(config)[0], "output.weight"]
    stored = {name: tensor(name, shape_of(config, name.split(".")[-2])) for name in names}
    write_gguf(wanted.out, {**metadata_of(config), **tokens}, stored)
    with GGUFFile.open(wanted.out) as file:
        read_config(file)
        print(f"{wanted.out}: {sum(math.prod(each.shape) for each in file.tensors.values()) / 1e6:.0f} M weights, {file.size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
