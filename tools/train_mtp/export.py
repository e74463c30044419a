"""Head weights as a GGUF file of one MTP block, and back.

The file is what llama.cpp calls an MTP-only file: the trunk's metadata with one layer more, and the tensors of that last layer alone
(``blk.N.nextn.*`` beside the block's usual names). Matrices are Q8_0, norms F32. The rows of q and k are stored for interleaved RoPE
pairs (2i, 2i + 1), as every GGUF of the architecture ``llama``; training works on halves (i, i + dims/2), as transformers does.
The token ids that the draft head runs over, most frequent first, are the metadata array ``strata.draft_vocab``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.weights.formats import BY_NAME, dequantize
from strata.weights.gguf import GGUFFile
from strata.weights.writer import StoredTensor, write_gguf

Weights = dict[str, NDArray[np.float32]]

NEXTN = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
BLOCK = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
NAMES = NEXTN + BLOCK
TRUNK_KEYS = ("context_length", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
              "rope.freq_base", "rope.dimension_count", "attention.layer_norm_rms_epsilon", "vocab_size")
DRAFT_VOCAB = "strata.draft_vocab"
ABOUT = ("One MTP block trained on text that SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) wrote itself, its weights frozen; "
         "started from a copy of that model's last layer. See docs/MTP_HEAD.md of Strata.")


def metadata_of(trunk: GGUFFile, vocab: NDArray[np.int32]) -> dict[str, object]:
    """The head's metadata: the trunk's dimensions (floats stay f32, as they were), one layer more, licence and draft vocabulary."""
    arch = str(trunk.metadata["general.architecture"])
    found: dict[str, object] = {
        "general.architecture": arch, "general.type": "model", "general.name": "SmolLM2-135M-Instruct MTP head",
        "general.license": "apache-2.0", "general.description": ABOUT, "general.file_type": 7, "general.quantization_version": 2,
        f"{arch}.block_count": int(trunk.metadata[f"{arch}.block_count"]) + 1,  # type: ignore[call-overload]
        f"{arch}.nextn_predict_layers": 1,
    }
    found |= {f"{arch}.{key}": trunk.metadata[f"{arch}.{key}"] for key in TRUNK_KEYS}
    return {**found, DRAFT_VOCAB: vocab.astype(np.int32)}


def q8_0(matrix: NDArray[np.float32]) -> NDArray[np.void]:
    """Blocks of 32 weights with the scale max|w| / 127, rounded half away from zero as ggml's reference does."""
    blocks = matrix.reshape(-1, 32).astype(np.float32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    steps = blocks * np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    stored = np.empty(len(blocks), BY_NAME["Q8_0"].dtype)
    stored["d"] = scale[:, 0]
    stored["qs"] = np.trunc(steps + np.copysign(np.float32(0.5), steps))
    return stored


def paired_rows(matrix: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of q or k from halves (i, i + dims/2) to pairs (2i, 2i + 1), in each head."""
    return matrix.reshape(heads, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def halved_rows(matrix: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The way back of paired_rows."""
    return matrix.reshape(heads, -1, 2, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def heads_of(trunk: GGUFFile) -> dict[str, int]:
    count = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    return {name: int(trunk.metadata[key]) for name, key in count.items()}  # type: ignore[call-overload]


def write_head(path: Path, trunk_path: Path, weights: Mapping[str, NDArray[np.float32]], vocab: NDArray[np.int32]) -> None:
    """Write the head whose ``weights`` (named as NAMES, q and k rows in halves) belong to the trunk at ``trunk_path``."""
    trunk = GGUFFile.open(trunk_path)
    heads, layer = heads_of(trunk), trunk.metadata["llama.block_count"]
    tensors = {}
    for name in NAMES:
        values = np.asarray(weights[name], np.float32)
        if name in heads:
            values = paired_rows(values, heads[name])
        kind = BY_NAME["Q8_0" if values.ndim == 2 else "F32"]
        tensors[f"blk.{layer}.{name}.weight"] = StoredTensor(kind, values.shape, q8_0(values) if values.ndim == 2 else values)
    write_gguf(path, metadata_of(trunk, vocab), tensors)
    trunk.close()


def read_head(path: Path) -> tuple[Weights, NDArray[np.int32]]:
    """(weights named as NAMES, q and k rows in halves; draft vocabulary) of a file that write_head wrote."""
    file = GGUFFile.open(path)
    heads, layer = heads_of(file), int(file.metadata["llama.block_count"]) - 1  # type: ignore[call-overload]
    weights = {name: dequantize(file.tensors[f"blk.{layer}.{name}.weight"]) for name in NAMES}
    for name, count in heads.items():
        weights[name] = halved_rows(weights[name], count)
    vocab = np.array(file.metadata[DRAFT_VOCAB], np.int32)
    file.close()
    return weights, vocab
