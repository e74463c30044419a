"""The tensors of a model by name, and their shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from strata.engine.architecture import DENSE, DENSE_BIASES, HEAD, HEAD_OPTIONAL, ROUTED, SHARED, ModelConfig
from strata.errors import ModelError
from strata.weights.gguf import GGUFFile

DRAFTS = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.nextn\.eh_proj\.weight")


def draft_blocks(names: Iterable[str]) -> tuple[int, ...]:
    """The blocks that draft, rising: those with the tensor that joins a token and a hidden state."""
    return tuple(sorted(int(match[1]) for match in map(DRAFTS.fullmatch, names) if match))


def block_names(config: ModelConfig, block: int) -> tuple[list[str], list[str]]:
    """(required, optional) names of one block, of the trunk or one that drafts. ``attn_rot_embd`` is a leftover of old converters
    that nothing reads."""
    family, experts = config.family, config.experts
    required, optional = [*family.required, f"{family.ffn_norm}.weight"], [*family.optional, "attn_rot_embd"]
    if experts is not None and config.routed(block):
        required += [*ROUTED, *family.routed, *(SHARED if experts.shared_width else ())]
    else:
        required, optional = [*required, *DENSE], [*optional, *DENSE_BIASES]
    if block in config.mtp_blocks:
        required, optional = [*required, *HEAD], [*optional, *HEAD_OPTIONAL]
    return [f"blk.{block}.{name}" for name in required], [f"blk.{block}.{name}" for name in optional]


def tensor_names(config: ModelConfig) -> tuple[list[str], list[str]]:
    """(required, optional) names of the whole model. What is left of a promised block that cannot draft may be there, and is not read."""
    required, optional = ["token_embd.weight", "output_norm.weight"], ["output.weight", "rope_freqs.weight"]
    for block in (*range(config.num_layers), *config.mtp_blocks):
        names = block_names(config, block)
        required += names[0]
        optional += names[1]
    for block in range(config.num_layers, config.num_layers + config.mtp_promised):
        names = block_names(config, block)
        optional += [*names[0], *names[1], *(f"blk.{block}.{name}" for name in (*HEAD, *HEAD_OPTIONAL))]
    return required, optional


def check_shapes(file: GGUFFile, config: ModelConfig) -> None:
    """Every tensor has the shape that the configuration says, and norms of q and k come together, or ModelError names what does not."""
    for name, tensor in file.tensors.items():
        part, _, kind = name.rpartition(".")
        expected = shape_of(config, part.split(".")[-1])
        if kind == "bias":
            expected = expected[:1]
        if kind in ("weight", "bias") and tensor.shape != expected:
            raise ModelError(f"{file.path}: tensor {name} is {tensor.shape}, expected {expected}; the file contradicts its metadata")
    _check_pairs(file)


def shape_of(config: ModelConfig, part: str) -> tuple[int, ...]:
    """Of the tensor called so within its block. What has no name here is a norm of the residual stream."""
    dim, width, ffn = config.head_dim, config.width, config.ffn_width
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    vocabulary = (config.vocab_size, width)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (q, width), "attn_k": (kv, width), "attn_v": (kv, width), "attn_output": (width, q),
        "ffn_gate": (ffn, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn),
        "attn_q_norm": (dim,), "attn_k_norm": (dim,), "rope_freqs": (config.rope.dims // 2,),
        "token_embd": vocabulary, "output": vocabulary, "embed_tokens": vocabulary, "shared_head_head": vocabulary,
        "eh_proj": (width, 2 * width),
    }  # fmt: skip
    if config.experts is not None:
        count, inner, shared = config.experts.count, config.experts.width, config.experts.shared_width
        shapes |= {
            "ffn_gate_inp": (count, width), "exp_probs_b": (count,),
            "ffn_gate_exps": (count, inner, width), "ffn_up_exps": (count, inner, width), "ffn_down_exps": (count, width, inner),
            "ffn_gate_shexp": (shared, width), "ffn_up_shexp": (shared, width), "ffn_down_shexp": (width, shared),
        }  # fmt: skip
    return shapes.get(part, (width,))


def _check_pairs(file: GGUFFile) -> None:
    for name in file.tensors:
        for one, other in (("attn_q_norm", "attn_k_norm"), ("attn_k_norm", "attn_q_norm")):
            if one in name and name.replace(one, other) not in file.tensors:
                raise ModelError(f"{file.path}: {name} is there without the {other} beside it; convert the model again")
