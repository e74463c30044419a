"""What a served architecture is: which tensors its blocks have, how it pairs dimensions for RoPE and routes rows to experts.

A family is data. Which optional parts a model has (biases, q/k norms, its own output matrix, RoPE factors) is read from the tensors that
are there, not from its name.

Tensor names are those of llama.cpp's converter. GGUF stores q and k of ``llama`` already permuted for interleaved pairs (2i, 2i + 1);
the others pair the halves (i, i + dims/2). In ``glm4moe`` the norm before the feed-forward network is ``post_attention_norm``.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.engine.rope import RopeConfig

Names = tuple[str, ...]

ATTENTION = ("attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight")
ATTENTION_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
QK_NORM = ("attn_q_norm.weight", "attn_k_norm.weight")
DENSE = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
DENSE_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
ROUTED = ("ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
SHARED = ("ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight")
HEAD = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")
HEAD_OPTIONAL = ("nextn.shared_head_norm.weight", "nextn.shared_head_head.weight", "nextn.embed_tokens.weight")

GATES = {1: "softmax", 2: "sigmoid"}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: ``required`` and ``optional`` are names within every block, ``interleaved`` the RoPE pairing as stored.

    ``gate`` is the router's default, empty for a dense family; ``normalised``: whether the weights of a row's experts sum to one
    where the file is silent; ``routed``: what a block with experts has besides ROUTED.
    """

    name: str
    interleaved: bool
    required: Names
    optional: Names
    ffn_norm: str = "ffn_norm"
    gate: str = ""
    normalised: bool = False
    routed: Names = ()


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", True, ATTENTION, ATTENTION_BIASES),
        Family("qwen2", False, ATTENTION, ATTENTION_BIASES),
        Family("qwen3", False, ATTENTION + QK_NORM, ATTENTION_BIASES),
        Family("qwen3moe", False, ATTENTION + QK_NORM, ATTENTION_BIASES, gate="softmax", normalised=True),
        Family(
            "glm4moe", False, ATTENTION, ATTENTION_BIASES + QK_NORM,
            ffn_norm="post_attention_norm", gate="sigmoid", routed=("exp_probs_b.bias",),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """How the blocks from ``dense_layers`` on route each row to ``used`` of ``count`` experts, each ``width`` wide.

    ``gate``: what makes scores of the router's outputs. ``normalised``: the weights of a row's experts sum to one, before ``scale``.
    ``groups``: experts stand in so many equal groups, and only those of the best ``groups_used`` can be chosen.
    ``shared_width``: of the expert that every row goes through, 0 for none.
    """

    count: int
    used: int
    width: int
    shared_width: int
    dense_layers: int
    gate: str
    normalised: bool
    scale: float
    groups: int
    groups_used: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers of one model. ``width`` is of the residual stream, ``context`` what it was trained for, ``eps`` of every RMSNorm.

    ``num_layers``: blocks of the trunk. ``mtp_blocks``: the indices of those after it that draft, as found in the file;
    ``mtp_promised``: how many its metadata speaks of. ``experts``: None for a dense model.
    """

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
    experts: ExpertConfig | None = None
    mtp_blocks: tuple[int, ...] = ()
    mtp_promised: int = 0

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def routed(self, layer: int) -> bool:
        """Whether this block has experts."""
        return self.experts is not None and layer >= self.experts.dense_layers
