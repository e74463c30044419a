"""What a GGUF architecture is made of: its configuration, read from the metadata, and the names of its tensors.

A family is data: which tensors its layers have, and how its q and k rows are paired for RoPE. Which optional parts a model
has (biases, q/k norms, its own output matrix, RoPE factors) is read from the tensors that are there, not from its name.

Keys and tensor names are those of llama.cpp's converter. GGUF stores q and k of ``llama`` already permuted for interleaved
pairs (2i, 2i + 1); ``qwen2`` and ``qwen3`` pair the halves (i, i + dims/2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strata.engine.rope import RopeConfig
from strata.errors import ModelError
from strata.weights.gguf import GGUFFile


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: ``required`` and ``optional`` are names within a layer, ``interleaved`` the RoPE pairing as stored."""

    name: str
    interleaved: bool
    required: tuple[str, ...]
    optional: tuple[str, ...]


ATTENTION = ("attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight")
DENSE_FFN = ("ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
QK_NORM = ("attn_q_norm.weight", "attn_k_norm.weight")

FAMILIES = {
    family.name: family
    for family in (
        Family("llama", True, ATTENTION + DENSE_FFN, BIASES),
        Family("qwen2", False, ATTENTION + DENSE_FFN, BIASES),
        Family("qwen3", False, ATTENTION + DENSE_FFN + QK_NORM, BIASES),
    )
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers of one model. ``width`` is of the residual stream, ``context`` what it was trained for, ``eps`` of every RMSNorm."""

    family: Family
    num_layers: int
    width: int
    ffn_width: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    context: int
    rope: RopeConfig
    tied: bool

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


class Keys:
    """Metadata of one model, read by key with the type checked. Raises ModelError that names file and key."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file, self.prefix = file, prefix
        self.metadata: Mapping[str, object] = file.metadata

    def number(self, key: str, default: float | None = None) -> float:
        name = f"{self.prefix}.{key}"
        value = self.metadata.get(name, default)
        if value is None:
            raise ModelError(f"{self.file.path}: has no {name}; convert the model again")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{self.file.path}: {name} is not one number, which is not served")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value < 1:
            raise ModelError(f"{self.file.path}: {self.prefix}.{key} is {value}, expected a whole number from 1")
        return int(value)

    def text(self, key: str, default: str) -> str:
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if not isinstance(value, str):
            raise ModelError(f"{self.file.path}: {self.prefix}.{key} is not a text")
        return value


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's configuration, its tensors checked for names and shapes.

    Raises ModelError for an architecture that is not served, for a missing key, and for missing, unexpected or misshapen tensors.
    """
    name = file.metadata.get("general.architecture")
    if name not in FAMILIES:
        raise ModelError(f"{file.path}: architecture {str(name)[:40]!r} is not served; served are {', '.join(FAMILIES)}")
    family = FAMILIES[str(name)]
    keys = Keys(file, family.name)
    if keys.number("expert_count", 0):
        raise ModelError(f"{file.path}: a {family.name} with experts is not served, only dense ones")
    layers = keys.count("block_count")
    bound = file.bind(*tensor_names(family, range(layers)))
    config = _dimensions(keys, family, layers, bound["token_embd.weight"].shape[0], tied="output.weight" not in bound)
    check_shapes(file, config)
    return config


def _dimensions(keys: Keys, family: Family, layers: int, vocab: int, tied: bool) -> ModelConfig:
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", width // heads)
    kv_heads = keys.count("attention.head_count_kv", heads)
    if heads % kv_heads or keys.count("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{keys.file.path}: {heads} heads over {kv_heads} KV heads, or keys and values of different widths: not served")
    return ModelConfig(
        family=family,
        num_layers=layers,
        width=width,
        ffn_width=keys.count("feed_forward_length"),
        vocab_size=vocab,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        context=keys.count("context_length"),
        rope=_rope(keys, head_dim, family.interleaved),
        tied=tied,
    )


def _rope(keys: Keys, head_dim: int, interleaved: bool) -> RopeConfig:
    """RoPE from the keys. ``rope.scale_linear`` is the older name of a linear scaling's factor."""
    dims = keys.count("rope.dimension_count", head_dim)
    scaling = keys.text("rope.scaling.type", "linear" if f"{keys.prefix}.rope.scale_linear" in keys.metadata else "none")
    if scaling not in ("none", "linear", "yarn") or dims % 2 or dims > head_dim:
        raise ModelError(f"{keys.file.path}: RoPE scaling {scaling!r} over {dims} of {head_dim} dimensions is not served")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    return RopeConfig(
        base=keys.number("rope.freq_base", 10000.0),
        dims=dims,
        interleaved=interleaved,
        scaling=scaling if factor > 0 else "none",
        factor=factor,
        original_context=keys.count("rope.scaling.original_context_length", keys.count("context_length")),
        magnitude=keys.number("rope.scaling.yarn_attn_factor", 0.0) or None,
        extrapolation=keys.number("rope.scaling.yarn_ext_factor", 1.0),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def tensor_names(family: Family, layers: range) -> tuple[list[str], list[str]]:
    """(required, optional) names of the whole model. ``attn_rot_embd`` is a leftover of old converters that nothing reads."""
    required = ["token_embd.weight", "output_norm.weight"]
    required += [f"blk.{layer}.{name}" for layer in layers for name in family.required]
    optional = ["output.weight", "rope_freqs.weight"]
    optional += [f"blk.{layer}.{name}" for layer in layers for name in (*family.optional, "attn_rot_embd")]
    return required, optional


def check_shapes(file: GGUFFile, config: ModelConfig) -> None:
    """Every tensor has the shape that the configuration says, or ModelError names it."""
    q, kv, width, ffn = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.width, config.ffn_width
    rows = {"attn_q": q, "attn_k": kv, "attn_v": kv, "attn_output": width, "ffn_gate": ffn, "ffn_up": ffn, "ffn_down": width}
    columns = {"attn_output": q, "ffn_down": ffn}
    vectors = {"attn_q_norm": config.head_dim, "attn_k_norm": config.head_dim, "rope_freqs": config.rope.dims // 2}
    for name, tensor in file.tensors.items():
        part, _, kind = name.rpartition(".")
        part = part.split(".")[-1]
        expected: tuple[int, ...] = (rows[part], columns.get(part, width)) if part in rows else (vectors.get(part, width),)
        if part in ("token_embd", "output"):
            expected = (config.vocab_size, width)
        elif kind == "bias":
            expected = expected[:1]
        if kind in ("weight", "bias") and tensor.shape != expected:
            raise ModelError(f"{file.path}: tensor {name} is {tensor.shape}, expected {expected}; the file contradicts its metadata")
