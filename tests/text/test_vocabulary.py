"""A broken tokenizer in a model file is refused by the key that is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata.errors import ModelError
from strata.text.tokenizer import Tokenizer
from tests.text.vocabularies import CONTROL, NORMAL, USER_DEFINED, bpe_metadata, spm_metadata

MERGES = ["a b", "ab c"]
GOOD = bpe_metadata(MERGES, {"<|im_end|>": CONTROL}, eos_token_id=258)


def broken(**keys: Any) -> dict[str, Any]:
    changed = {**GOOD, **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}}
    return {key: value for key, value in changed.items() if value is not None}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": None}, r"ggml\.model is missing"),
        ({"model": 3}, r"ggml\.model is missing or not a string"),
        ({"model": "bert"}, r"ggml\.model: the tokenizer 'bert' is not known. Known: gpt2, llama"),
        ({"pre": 7}, r"ggml\.pre is missing or not a string"),
        ({"tokens": None}, r"ggml\.tokens is missing"),
        ({"tokens": []}, r"ggml\.tokens is empty"),
        ({"tokens": "abc"}, r"ggml\.tokens must be an array of strings"),
        ({"tokens": [1, 2]}, r"ggml\.tokens must be an array of strings"),
        ({"tokens": [*GOOD["tokenizer.ggml.tokens"][:-1], "a"]}, r"ggml\.tokens: 'a' stands twice, at 97 and 258"),
        ({"tokens": [*GOOD["tokenizer.ggml.tokens"][:-1], "\udcff"]}, r"ggml\.tokens holds a string that is not UTF-8"),
        ({"token_type": [1, 1]}, r"ggml\.token_type has 2 entries for 259 tokens"),
        ({"token_type": np.ones(300, np.int32)}, r"ggml\.token_type has 300 entries for 259 tokens"),
        ({"token_type": ["a"] * 259}, r"ggml\.token_type must be an array of numbers"),
        ({"token_type": 3}, r"ggml\.token_type must be an array of numbers"),
        ({"merges": None}, r"ggml\.merges is missing"),
        ({"merges": ["a b", "abc"]}, r"ggml\.merges: entry 1 \('abc'\) does not join"),
        ({"merges": ["a b", "ab zzz"]}, r"ggml\.merges: entry 1 \('ab zzz'\) does not join"),
        ({"merges": ["a c"]}, r"ggml\.merges: entry 0 \('a c'\) does not join"),
        ({"merges": ["a \udcff"]}, r"ggml\.merges holds a string that is not UTF-8"),
        ({"eos_token_id": 259}, r"ggml\.eos_token_id is 259, outside the vocabulary of 259"),
        ({"eos_token_id": -1}, r"ggml\.eos_token_id is -1, outside"),
        ({"bos_token_id": 2**32 - 1}, r"ggml\.bos_token_id is 4294967295, outside"),
        ({"eot_token_id": "x"}, r"ggml\.eot_token_id must be a token id"),
        ({"eom_token_id": True}, r"ggml\.eom_token_id must be a token id"),
        ({"eom_token_id": 1.5}, r"ggml\.eom_token_id must be a token id"),
        ({"add_bos_token": 1}, r"ggml\.add_bos_token must be true or false"),
        ({"add_bos_token": True}, r"add_bos_token is true, but tokenizer\.ggml\.bos_token_id is missing"),
        ({"add_eos_token": True, "eos_token_id": None}, r"add_eos_token is true, but tokenizer\.ggml\.eos_token_id is missing"),
    ],
)
def test_each_fault_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_metadata(broken(**keys))


def test_numpy_values_are_read_like_plain_ones() -> None:
    types = np.array(GOOD["tokenizer.ggml.token_type"], np.int32)
    metadata = broken(token_type=types, eos_token_id=np.uint32(258), bos_token_id=np.uint32(5), add_bos_token=np.True_)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert (tokenizer.eos, tokenizer.bos, tokenizer.add_bos, tokenizer.is_special(258)) == (258, 5, True, True)


def test_without_types_every_token_is_normal() -> None:
    tokenizer = Tokenizer.from_metadata(broken(token_type=None, eos_token_id=None))
    assert not tokenizer.is_special(100) and tokenizer.end_tokens == {258}


def test_an_empty_token_gets_a_name() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata([], {"": NORMAL}))
    assert tokenizer.token_text(256) == "[EMPTY_256]"


def ends(special: dict[str, int], **keys: Any) -> set[str]:
    tokenizer = Tokenizer.from_metadata(bpe_metadata([], special, **keys))
    return {tokenizer.token_text(token) for token in tokenizer.end_tokens}


def test_the_tokens_that_end_an_answer() -> None:
    named = {"<e>": CONTROL, "<t>": CONTROL, "<m>": CONTROL}
    assert ends(named, eos_token_id=256, eot_token_id=257, eom_token_id=258) == set(named)
    names = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<end_of_turn>", "<|end_of_text|>", "<|end|>", "<turn|>"}
    assert ends(dict.fromkeys(names, CONTROL)) == names
    # A file that typed it as an ordinary token still means it.
    assert ends({"<|im_end|>": NORMAL}) == {"<|im_end|>"}
    assert Tokenizer.from_metadata(bpe_metadata([], {"<|im_end|>": USER_DEFINED})).is_special(256)


def test_names_that_can_be_words_end_an_answer_only_as_control_tokens() -> None:
    assert ends({"</s>": NORMAL}) == set()
    assert ends({"</s>": CONTROL}) == {"</s>"}


def test_between_the_messages_of_one_answer_there_is_no_end() -> None:
    assert ends({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}) == {"<|return|>", "<|call|>"}


def test_a_sentencepiece_vocabulary_smaller_than_its_defaults() -> None:
    metadata = spm_metadata({})
    for key, value in (("tokens", ["a"]), ("token_type", [1]), ("scores", [0.0]), ("add_bos_token", False)):
        metadata[f"tokenizer.ggml.{key}"] = value
    tokenizer = Tokenizer.from_metadata(metadata)
    assert (tokenizer.bos, tokenizer.eos) == (None, None)
