"""Sentencepiece vocabularies against the algorithm's definition: join the best-scored neighbours until none is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import ModelError
from strata.text.detokenize import Detokenizer
from strata.text.tokenizer import Tokenizer
from tests.text.vocabularies import CONTROL, USER_DEFINED, spm_metadata, texts

PIECES = {"▁h": -1.0, "he": -2.0, "▁he": -3.0, "ll": -4.0, "llo": -5.0, "▁hello": -6.0, "▁▁": -7.0}
LETTERS = {letter: -20.0 - number for number, letter in enumerate("▁helo<s>/wrd")}


def hand_made(**keys) -> Tokenizer:
    return Tokenizer.from_metadata(spm_metadata({**PIECES, **LETTERS}, {"<|im_end|>": CONTROL, "\t\t": USER_DEFINED}, **keys))


def slow_spm(text: str, scores: dict[str, float]) -> list[str]:
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[a + b], at) for at, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in scores]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [piece for part in parts for piece in ([part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()])]


def test_by_hand() -> None:
    tokenizer = hand_made()
    # ▁h joins first (-1), which keeps "he" from forming there; then ▁h+e = ▁he, ll, and llo; ▁hello = ▁he + llo.
    assert texts(tokenizer, tokenizer.encode("hello hello", add_special=False, parse_special=False)) == ["▁hello", "▁hello"]
    assert texts(tokenizer, tokenizer.encode("é", add_special=False, parse_special=False)) == ["▁", "<0xC3>", "<0xA9>"]


@given(
    st.text(alphabet="abc ", max_size=30),
    st.lists(st.text(alphabet="abc▁", min_size=2, max_size=6), unique=True, max_size=30),
    st.randoms(use_true_random=False),
)
def test_equals_its_definition(text: str, pieces: list[str], random) -> None:
    names = [*"abc▁", *pieces]
    random.shuffle(names)
    scores = {name: -float(rank) for rank, name in enumerate(names)}
    tokenizer = Tokenizer.from_metadata(spm_metadata(scores))
    assert texts(tokenizer, tokenizer.encode(text, add_special=False, parse_special=False)) == slow_spm(" " + text if text else "", scores)


@given(st.text())
def test_round_trip(text: str) -> None:
    for add_space_prefix in (True, False):
        tokenizer = hand_made(add_space_prefix=add_space_prefix)
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_a_space_is_put_in_front_of_a_text_and_after_a_special_token() -> None:
    tokenizer = hand_made()
    ids = tokenizer.encode("hello<|im_end|>hello\t\thello", add_special=True, parse_special=True)
    assert texts(tokenizer, ids) == ["<s>", "▁hello", "<|im_end|>", "▁hello", "\t\t", "▁hello"]
    assert tokenizer.decode(ids[:2]) == "<s>hello"
    without = hand_made(add_space_prefix=False)
    assert texts(without, without.encode("hello", add_special=True, parse_special=True)) == ["<s>", "he", "llo"]


def test_control_names_cannot_be_spelled() -> None:
    tokenizer = Tokenizer.from_metadata(spm_metadata({**LETTERS, "</": -1.0, "s>": -2.0}))
    ids = tokenizer.encode("</s>", add_special=False, parse_special=False)
    assert texts(tokenizer, ids) == ["▁", "</", "s>"]
    assert tokenizer.encode("</s>", add_special=False, parse_special=True) == [2]


def test_defaults_of_the_format() -> None:
    tokenizer = hand_made()
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (1, 2, True)
    assert {"</s>", "<|im_end|>"} == set(texts(tokenizer, list(tokenizer.end_tokens)))
    assert tokenizer.encode("<s>hello", add_special=True, parse_special=True)[:2] == [1, tokenizer.encode_plain("hello", True)[0]]


def test_what_is_generated_keeps_its_space() -> None:
    tokenizer = hand_made()
    hello = tokenizer.encode_plain("hello", True)
    out = Detokenizer(tokenizer)
    assert "".join(out.push(token) for token in hello) + out.flush() == " hello"
    assert tokenizer.decode(hello) == "hello"


def test_byte_tokens() -> None:
    tokenizer = hand_made()
    assert tokenizer.token_bytes(3 + 0x0A) == b"\n"
    assert tokenizer.decode([3 + byte for byte in "海".encode()]) == "海"


def test_scores_are_needed() -> None:
    with pytest.raises(ModelError, match="tokenizer.ggml.scores is missing"):
        hand_made(scores=None)
    with pytest.raises(ModelError, match="tokenizer.ggml.scores has 1 entries for"):
        hand_made(scores=[0.0])
    with pytest.raises(ModelError, match="not a number"):
        hand_made(scores=[float("nan")] * 280)
