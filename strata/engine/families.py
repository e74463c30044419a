"""The configuration of a model, read from its metadata and checked against its tensors.

Multi-token prediction: ``block_count`` counts the blocks that draft, ``nextn_predict_layers`` says how many those are. Both are only
words: tools strip such blocks and leave the keys, or write none. A block drafts if it has the tensor ``nextn.eh_proj``, and the trunk is
what lies before the first.
"""

from __future__ import annotations

from strata.engine.architecture import FAMILIES, GATES, ExpertConfig, Family, ModelConfig
from strata.engine.keys import Keys
from strata.engine.rope import RopeConfig
from strata.engine.tensor_names import check_shapes, draft_blocks, tensor_names
from strata.errors import ModelError
from strata.weights.gguf import GGUFFile

__all__ = ["ModelConfig", "read_config"]


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's configuration, its tensors checked for names and shapes.

    Raises ModelError for an architecture that is not served, for a missing key, and for missing, unexpected or misshapen tensors.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(f"{file.path}: architecture {str(name)[:40]!r} is not served; served are {', '.join(FAMILIES)}")
    config = _dimensions(Keys(file, name), FAMILIES[name])
    file.bind(*tensor_names(config))
    check_shapes(file, config)
    return config


def _dimensions(keys: Keys, family: Family) -> ModelConfig:
    width, heads, tensors = keys.count("embedding_length"), keys.count("attention.head_count"), keys.file.tensors
    head_dim = keys.count("attention.key_length", width // heads)
    kv_heads = keys.count("attention.head_count_kv", heads)
    if heads % kv_heads or keys.count("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{keys.file.path}: {heads} heads over {kv_heads} KV heads, or keys and values of different widths: not served")
    experts = _experts(keys, family)
    layers, promised, heads_found = _blocks(keys)
    return ModelConfig(
        family=family,
        num_layers=layers,
        width=width,
        ffn_width=keys.count("feed_forward_length", experts.width if experts else None),
        vocab_size=tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        eps=keys.positive("attention.layer_norm_rms_epsilon"),
        context=keys.count("context_length"),
        rope=_rope(keys, head_dim, family.interleaved),
        tied="output.weight" not in tensors,
        experts=experts,
        mtp_blocks=heads_found,
        mtp_promised=promised,
    )


def _blocks(keys: Keys) -> tuple[int, int, tuple[int, ...]]:
    """Blocks of the trunk, how many more the metadata promises, and those that draft."""
    found = draft_blocks(keys.file.tensors)
    blocks, promised = keys.count("block_count"), keys.count("nextn_predict_layers", 0, least=0)
    layers = min([blocks - promised, *found])
    if blocks > len(keys.file.tensors):  # said before a name of theirs is made up
        raise ModelError(f"{keys.file.path}: {keys.prefix}.block_count is {blocks}, and the file has {len(keys.file.tensors)} tensors")
    if layers < 1 or found != tuple(range(layers, layers + len(found))) or (promised and found and layers != blocks - promised):
        raise ModelError(
            f"{keys.file.path}: {blocks} blocks, {promised} of them for drafts, and those found are {list(found)}; convert the model again"
        )
    return layers, promised, found


def _experts(keys: Keys, family: Family) -> ExpertConfig | None:
    """How rows are routed; None for a dense family, which may not have experts. Raises ModelError for routing that is not served."""
    if not family.gate:
        if keys.count("expert_count", 0, least=0):
            raise ModelError(f"{keys.file.path}: a {family.name} with experts is not served, only dense ones")
        return None
    count, used = keys.count("expert_count"), keys.count("expert_used_count")
    groups, groups_used = keys.count("expert_group_count", 1), keys.count("expert_group_used_count", 1)
    kind = keys.count("expert_gating_func", 0, least=0)
    if kind and kind not in GATES or count % groups or groups_used > groups or used > count // groups * groups_used:
        raise ModelError(
            f"{keys.file.path}: {used} of {count} experts in {groups_used} of {groups} groups with gating function {kind} is not served; "
            "served are 1 (softmax) and 2 (sigmoid), and groups of equal size that hold the experts used"
        )
    width = keys.count("expert_feed_forward_length")
    return ExpertConfig(
        count=count,
        used=used,
        width=width,
        shared_width=width * keys.count("expert_shared_count", 0, least=0),
        dense_layers=keys.count("leading_dense_block_count", 0, least=0),
        gate=GATES.get(kind, family.gate),
        normalised=keys.flag("expert_weights_norm", family.normalised),
        scale=keys.number("expert_weights_scale", 0.0) or 1.0,
        groups=groups,
        groups_used=groups_used,
    )


def _rope(keys: Keys, head_dim: int, interleaved: bool) -> RopeConfig:
    """RoPE from the keys. ``rope.scale_linear`` is the older name of a linear scaling's factor."""
    dims = keys.count("rope.dimension_count", head_dim)
    scaling = keys.text("rope.scaling.type", "linear" if f"{keys.prefix}.rope.scale_linear" in keys.metadata else "none")
    if scaling not in ("none", "linear", "yarn") or dims % 2 or dims > head_dim:
        raise ModelError(f"{keys.file.path}: RoPE scaling {scaling!r} over {dims} of {head_dim} dimensions is not served")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    return RopeConfig(
        base=keys.positive("rope.freq_base", 10000.0),
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
