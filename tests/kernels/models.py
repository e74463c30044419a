"""Small random models in chosen formats, for what the committed ones do not have: biases, unequal layouts, tied heads on kernels."""

import numpy as np

from strata.weights.formats import BY_NAME
from strata.weights.writer import StoredTensor, write_gguf

WIDTH, FFN, HEADS, KV_HEADS, DIM, VOCAB = 256, 512, 4, 2, 64, 320
FORMATS = {
    "attn_q": "IQ3_S", "attn_k": "Q6_K", "attn_v": "Q4_K", "attn_output": "Q5_K", "ffn_gate": "Q4_0", "ffn_up": "Q8_0",
    "ffn_down": "IQ4_XS", "token_embd": "Q5_1",
}  # fmt: skip


def random_tensor(rng, name, shape):
    """Random blocks whose scales make weights of about 1/16; bytes of small integers stay random."""
    format = BY_NAME[name]
    blocks = rng.integers(0, 256, format.size(int(np.prod(shape))), dtype=np.uint8).view(format.dtype)
    steps = {"Q6_K": 40 * 18, "Q4_K": 32 * 8, "Q5_K": 32 * 16, "IQ4_XS": 16 * 60, "IQ3_S": 16 * 8, "Q8_0": 70, "Q5_1": 16, "Q4_0": 5}[name]
    blocks["d"] = rng.uniform(0.03, 0.08, len(blocks)) / steps
    for offset in {"m", "dmin"} & set(format.dtype.names):
        blocks[offset] = -15.5 * blocks["d"] if offset == "m" else blocks["d"] * (7.5 if name == "Q4_K" else 15.5)
    return StoredTensor(format, shape, blocks.view(np.uint8))


def floats(values):
    return StoredTensor(BY_NAME["F32"], values.shape, values.astype(np.float32))


def write_mixed(path, rng):
    """A tied qwen2 of two layers with biases on q, k, v and, in the first layer, on gate alone."""
    meta = {
        "general.architecture": "qwen2", "qwen2.block_count": 2, "qwen2.context_length": 512, "qwen2.embedding_length": WIDTH,
        "qwen2.feed_forward_length": FFN, "qwen2.attention.head_count": HEADS, "qwen2.attention.head_count_kv": KV_HEADS,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    rows = {"attn_q": HEADS * DIM, "attn_k": KV_HEADS * DIM, "attn_v": KV_HEADS * DIM, "attn_output": WIDTH, "ffn_gate": FFN, "ffn_up": FFN}
    tensors = {
        "token_embd.weight": random_tensor(rng, FORMATS["token_embd"], (VOCAB, WIDTH)),
        "output_norm.weight": floats(rng.uniform(0.5, 1.5, WIDTH)),
    }
    for layer in range(2):
        at = f"blk.{layer}."
        for part, format in FORMATS.items():
            if part != "token_embd":
                shape = (rows.get(part, WIDTH), FFN if part == "ffn_down" else WIDTH)
                tensors[f"{at}{part}.weight"] = random_tensor(rng, format, shape)
        for part in ("attn_q", "attn_k", "attn_v") + (("ffn_gate",) if layer == 0 else ()):
            tensors[f"{at}{part}.bias"] = floats(rng.standard_normal(rows[part]) / 4)
        for part in ("attn_norm", "ffn_norm"):
            tensors[f"{at}{part}.weight"] = floats(rng.uniform(0.5, 1.5, WIDTH))
    write_gguf(path, meta, tensors)
