"""Each pre-tokenizer on texts where the families differ, against splits worked out from their published patterns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.errors import ModelError
from strata.text.backend import build
from strata.text.pretokenizers import PRE_TOKENIZERS
from strata.text.vocabulary import read_vocabulary
from tests.text.vocabularies import bpe_metadata, byte_symbols


def words(pre: str, text: str) -> list[str]:
    """The words as text: the tokenizer writes bytes as symbols, which are turned back here."""
    split = build(read_vocabulary(bpe_metadata([], pre=pre))).pre_tokenizer.pre_tokenize_str(text)
    byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    return [bytes(byte_of[symbol] for symbol in word).decode() for word, _ in split]


@pytest.mark.parametrize(
    ("pre", "text", "wanted"),
    [
        # digits: all together, one by one, in threes from the left
        ("gpt-2", "x 12345", ["x", " 12345"]),
        ("smollm", "x 123", ["x", " ", "1", "2", "3"]),
        ("qwen2", "x 123", ["x", " ", "1", "2", "3"]),
        ("llama-bpe", "x 12345", ["x", " ", "123", "45"]),
        ("deepseek-v3", "x 12345", ["x", " ", "123", "45"]),
        ("tekken", "x 123", ["x", " ", "1", "2", "3"]),
        ("falcon", "12345", ["123", "45"]),
        # what may stand before a word: a space only, or any one sign
        ("gpt-2", "(word) a", ["(", "word", ")", " a"]),
        ("llama-bpe", "(word) a", ["(word", ")", " a"]),
        # contractions: small letters only, or any case
        ("gpt-2", "I'll I'LL", ["I", "'ll", " I", "'", "LL"]),
        ("qwen2", "I'll I'LL", ["I", "'ll", " I", "'LL"]),
        ("tekken", "I'll", ["I", "'ll"]),
        ("gpt-4o", "we'll", ["we'll"]),
        # combining marks: cut off, or part of the word
        ("qwen2", "नी", ["न", "ी"]),
        ("qwen35", "नी", ["नी"]),
        ("deepseek-v3", "नी", ["नी"]),
        # case changes
        ("llama-bpe", "HelloWorld", ["HelloWorld"]),
        ("gpt-4o", "HelloWorld", ["Hello", "World"]),
        ("tekken", "HELLOworld", ["HELLOworld"]),
        # line ends stay with the signs before them, or do not
        ("gpt-2", "a;\n\n b", ["a", ";", "\n\n", " b"]),
        ("llama-bpe", "a;\n\n b", ["a", ";\n\n", " b"]),
        ("seed-coder", "a;\n\n b", ["a", ";", "\n\n", " b"]),
        # scripts apart
        ("deepseek-v3", "ab世界cd", ["ab", "世界", "cd"]),
        ("qwen2", "ab世界cd", ["ab世界cd"]),
        ("bloom", "a.b c", ["a", ".", "b", " c"]),
        ("deepseek-coder", "a\n b1", ["a", "\n", " b", "1"]),
        ("default", "a+b", ["a", "+", "b"]),
        ("bailingmoe", "a\n\nb", ["a", "\n\n", "b"]),
        # runs of spaces: the last one goes with the word
        ("glm4", "a   b", ["a", "  ", " b"]),
        ("smollm", "a   b", ["a", "  ", " b"]),
    ],
)
def test_words(pre: str, text: str, wanted: list[str]) -> None:
    assert words(pre, text) == wanted


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@settings(max_examples=15)
@given(text=st.text(alphabet=st.one_of(st.sampled_from("aB1' .\n\r\t世ी!$"), st.characters(exclude_categories=["Cs"])), max_size=30))
def test_words_are_the_text_cut(pre: str, text: str) -> None:
    split = TOKENIZERS[pre].pre_tokenizer.pre_tokenize_str(text)
    symbols = byte_symbols()
    assert "".join(word for word, _ in split) == "".join(symbols[byte] for byte in text.encode())


TOKENIZERS = {pre: build(read_vocabulary(bpe_metadata([], pre=pre))) for pre in PRE_TOKENIZERS}


def test_an_unknown_one_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'nosuchpre' is not known.*llama-bpe.*qwen2"):
        read_vocabulary(bpe_metadata([], pre="nosuchpre"))


@pytest.mark.parametrize(
    ("pre", "ignores"), [("llama-bpe", True), ("glm4", True), ("tekken", True), ("qwen2", False), ("chatglm-bpe", False)]
)
def test_who_ignores_merges(pre: str, ignores: bool) -> None:
    assert PRE_TOKENIZERS[pre].ignore_merges is ignores
