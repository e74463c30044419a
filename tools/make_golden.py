"""Makes the small random models of tests/data/golden and what transformers computes for them.

Each model is written twice from one set of weights: as a transformers model (the oracle, float32 on the CPU) and as a GGUF
file with the conventions of llama.cpp's converter, restated here so that the files do not come from the code they test:

- ``llama``: the rows of q and k (weights and biases) are permuted, because its RoPE turns neighbouring pairs (2i, 2i + 1),
  where transformers turns (i, i + head/2). ``qwen2`` and ``qwen3`` keep the order of transformers.
- ``llama3`` scaling becomes a tensor ``rope_freqs.weight`` of head/2 divisors; ``linear`` and ``yarn`` become metadata keys.
- matrices are stored as F16 (rounded before the oracle sees them), norms, biases and divisors as F32.

The scaled models are read far beyond their original context, and a model without its scaling must give other logits: a case
that could not fail is refused. Development only: needs torch, transformers and gguf (see tests/data/golden/README.md).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

HIDDEN, FFN, LAYERS, VOCAB, HEADS, KV_HEADS = 64, 128, 2, 512, 4, 2
BASE, EPS = 10000.0, 1e-6
NUM_IDS, PROMPT, ANSWER = 40, 12, 48
SMALLEST_GAP = 0.01  # below it float32 rounding of another implementation might turn a greedy choice


@dataclass(frozen=True)
class Case:
    """One model: its architecture, the size of a head, its RoPE scaling as in config.json, and what else is special."""

    name: str
    arch: str
    seed: int
    head: int = 16
    tied: bool = False
    scaling: dict[str, Any] = field(default_factory=dict)
    biases: bool = False


CASES = (
    Case("llama-linear", "llama", 11, scaling={"rope_type": "linear", "factor": 4.0}),
    Case("llama-llama3", "llama", 72, tied=True, scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}),
    Case("llama-yarn", "llama", 3, head=32, scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
    Case("llama-bias", "llama", 64, biases=True),
    Case("qwen2", "qwen2", 55, tied=True),
    Case("qwen3", "qwen3", 16, head=32),
    Case("qwen3-yarn", "qwen3", 17, head=32, tied=True, scaling={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 0.5,
        "attention_factor": 1.25}),
)


def build(case: Case, scaling: dict[str, Any]) -> Any:
    """The oracle: weights drawn from ``case.seed``, matrices rounded to float16 and held in float32."""
    kinds = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    extra: dict[str, Any] = {"attention_bias": case.biases, "mlp_bias": case.biases} if case.arch == "llama" else {}
    if case.arch != "qwen2":
        extra["head_dim"] = case.head
    config = getattr(transformers, kinds[case.arch] + "Config")(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=128, rms_norm_eps=EPS, tie_word_embeddings=case.tied,
        rope_parameters={"rope_type": "default", "rope_theta": BASE, **scaling}, attn_implementation="eager", **extra)
    model = getattr(transformers, kinds[case.arch] + "ForCausalLM")(config).eval().float()
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(draw(name, noise, case.tied))
    return model


def draw(name: str, noise: torch.Tensor, tied: bool) -> torch.Tensor:
    """Scales that give sharp attention (so that positions matter) and logits with a spread of a few units."""
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if noise.dim() == 1:
        return 0.3 * noise
    gain = 1.0 if "embed" in name and not tied else 2.0 / math.sqrt(noise.shape[1])
    return (gain * noise).half().float()


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows from transformers' order (first halves, second halves of each head) to neighbouring pairs."""
    head = weight.shape[0] // heads
    return weight.reshape(heads, 2, head // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tensors(case: Case, model: Any) -> dict[str, np.ndarray]:
    """GGUF names and arrays of the oracle's weights."""
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    result = {}
    for name, parameter in sorted(model.named_parameters()):
        array = parameter.detach().numpy()
        if name in whole:
            result[whole[name]] = array
            continue
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        part, kind = rest.rsplit(".", 1)
        if case.arch == "llama" and part.endswith(("q_proj", "k_proj")):
            array = permute(array, HEADS if part.endswith("q_proj") else KV_HEADS)
        result[f"blk.{layer}.{parts[part]}.{kind}"] = array
    if case.scaling.get("rope_type") == "llama3":
        result["rope_freqs.weight"] = llama3_divisors(case)
    return result


def llama3_divisors(case: Case) -> np.ndarray:
    """What each frequency is divided by: 1 for short waves, ``factor`` for long ones, between them interpolated."""
    scaling = case.scaling
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    divisors = []
    for pair in range(case.head // 2):
        turns = scaling["original_max_position_embeddings"] * BASE ** (-2 * pair / case.head) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    if len({d in (1.0, factor) for d in divisors}) != 2 or min(divisors) != 1.0 or max(divisors) != factor:
        raise SystemExit(f"{case.name}: the divisors {divisors} do not show all three ranges")
    return np.array(divisors, np.float32)


def write(case: Case, model: Any, tokenizer: Path, path: Path) -> None:
    writer = gguf.GGUFWriter(path, case.arch)
    writer.add_name(f"strata golden {case.name}")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(case.head)
    writer.add_value_length(case.head)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(BASE)
    writer.add_vocab_size(VOCAB)
    if case.arch == "llama":
        writer.add_rope_dimension_count(case.head)
    add_scaling(writer, case.scaling)
    for key, item in gguf.GGUFReader(tokenizer).fields.items():
        if key.startswith("tokenizer."):
            sub_type = item.types[1] if len(item.types) > 1 else None
            writer.add_key_value(key, item.contents(), item.types[0], sub_type)
    for name, array in tensors(case, model).items():
        writer.add_tensor(name, array.astype(np.float16 if array.ndim == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_scaling(writer: Any, scaling: dict[str, Any]) -> None:
    kind = scaling.get("rope_type")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "attention_factor" in scaling:
            writer.add_rope_scaling_yarn_attn_factor(scaling["attention_factor"])
        if "beta_fast" in scaling:
            writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def oracle(case: Case, model: Any) -> dict[str, np.ndarray]:
    """The arrays of the .npz: logits of 40 random ids, and a greedy continuation with the gap between the two best logits."""
    rng = np.random.default_rng(case.seed)
    ids = rng.integers(3, VOCAB, NUM_IDS)
    prompt = rng.integers(3, VOCAB, PROMPT)
    logits = logits_of(model, ids.tolist())
    if case.scaling:
        change = np.abs(logits - logits_of(build(case, {}), ids.tolist())).max()
        print(f"  without its scaling the logits change by {change:.2f}")
        if change < 0.5:
            raise SystemExit(f"{case.name}: the scaling hardly matters; change the sizes")
    row, greedy, gaps = prompt.tolist(), [], []
    for _ in range(ANSWER):
        last = logits_of(model, row)[-1]
        second, best = np.sort(last)[-2:]
        greedy.append(int(last.argmax()))
        gaps.append(best - second)
        row.append(greedy[-1])
    return {"ids": ids.astype(np.int32), "logits": logits.astype(np.float32), "greedy_prompt": prompt.astype(np.int32),
            "greedy": np.array(greedy, np.int32), "greedy_gap": np.array(gaps, np.float32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="a GGUF file whose 512-token vocabulary the models get")
    parser.add_argument("--out", type=Path, default=Path("tests/data/golden"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for case in CASES:
        model = build(case, case.scaling)
        print(case.name)
        arrays = oracle(case, model)
        write(case, model, options.tokenizer, options.out / f"{case.name}.gguf")
        np.savez_compressed(options.out / f"{case.name}.npz", **arrays)
        if arrays["greedy_gap"].min() < SMALLEST_GAP:
            raise SystemExit(f"{case.name}: two tokens are closer than {SMALLEST_GAP}; take another seed")
        print(f"  logit spread {arrays['logits'].std():.2f}, {len(set(arrays['greedy'].tolist()))} different greedy tokens, "
              f"smallest gap {arrays['greedy_gap'].min():.4f}")


if __name__ == "__main__":
    main()
