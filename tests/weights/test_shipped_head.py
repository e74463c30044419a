"""The MTP head that is shipped with the project opens, is small, and is made for SmolLM2-135M."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from strata.weights.formats import dequantize
from strata.weights.gguf import GGUFFile
from tests.house.source import ROOT

PATH = ROOT / "configs" / "heads" / "smollm2-135m-mtp.gguf"
WIDTH, KV, FFN, VOCAB, LAYERS = 576, 192, 1536, 49152, 30
SHAPES = {
    "nextn.eh_proj": (WIDTH, 2 * WIDTH), "nextn.enorm": (WIDTH,), "nextn.hnorm": (WIDTH,), "nextn.shared_head_norm": (WIDTH,),
    "attn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_k": (KV, WIDTH), "attn_v": (KV, WIDTH), "attn_output": (WIDTH, WIDTH),
    "ffn_norm": (WIDTH,), "ffn_gate": (FFN, WIDTH), "ffn_up": (FFN, WIDTH), "ffn_down": (WIDTH, FFN),
}


@pytest.fixture(scope="module")
def head() -> Iterator[GGUFFile]:
    file = GGUFFile.open(PATH)
    yield file
    file.close()


def test_it_is_small() -> None:
    assert PATH.stat().st_size < 6_000_000


def test_it_has_the_tensors_of_one_block_behind_the_trunk(head: GGUFFile) -> None:
    assert {name: tensor.shape for name, tensor in head.tensors.items()} == {
        f"blk.{LAYERS}.{name}.weight": shape for name, shape in SHAPES.items()}
    for tensor in head.tensors.values():
        assert tensor.type.name == ("Q8_0" if len(tensor.shape) == 2 else "F32"), tensor.name


def test_its_weights_are_those_of_a_trained_block(head: GGUFFile) -> None:
    for tensor in head.tensors.values():
        values = dequantize(tensor)
        assert np.isfinite(values).all() and values.std() > 0.01, tensor.name
        assert np.abs(values).max() < 100, tensor.name


def test_its_metadata_are_the_trunks_with_a_layer_more(head: GGUFFile) -> None:
    expected = {
        "general.architecture": "llama", "general.license": "apache-2.0", "llama.block_count": LAYERS + 1, "llama.nextn_predict_layers": 1,
        "llama.embedding_length": WIDTH, "llama.feed_forward_length": FFN, "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3, "llama.rope.freq_base": 100000.0, "llama.rope.dimension_count": 64, "llama.vocab_size": VOCAB,
    }
    assert {key: head.metadata[key] for key in expected} == expected
    assert head.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)


def test_its_draft_vocabulary_names_each_token_once(head: GGUFFile) -> None:
    vocabulary = head.metadata["strata.draft_vocab"]
    assert isinstance(vocabulary, np.ndarray) and vocabulary.dtype == np.int32 and vocabulary.shape == (16384,)
    assert len(np.unique(vocabulary)) == len(vocabulary)
    assert vocabulary.min() >= 0 and vocabulary.max() < VOCAB
    # By frequency: the first thousand are common, which a byte-pair vocabulary shows by low ids.
    assert np.median(vocabulary[:1000]) < np.median(vocabulary[-1000:])
    assert 2 in vocabulary, "the end of an answer must be draftable"
