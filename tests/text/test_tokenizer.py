"""Text to tokens and back: SmolLM2's goldens (made by another program), and byte-pair merging worked out by hand."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import ClientError, ContextExceeded
from strata.text.tokenizer import Tokenizer
from strata.weights.gguf import GGUFFile
from tests.text.vocabularies import CONTROL, DATA, UNUSED, USER_DEFINED, bpe_metadata, byte_symbols, smollm2_tokenizer, texts

GOLDENS = json.loads((DATA / "smollm2-tokenizer.json").read_text(encoding="utf-8"))
MERGES = ["h e", "l l", "he ll", "Ġ w", "hell o", "o w"]
SPECIAL = {"<|im_end|>": CONTROL, "<think>": USER_DEFINED, "<pad>": UNUSED, "<s>": CONTROL}


def hand_made(**keys) -> Tokenizer:
    return Tokenizer.from_metadata(bpe_metadata(MERGES, SPECIAL, **keys))


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: ascii(golden["text"][:30]))
def test_goldens(golden) -> None:
    tokenizer = smollm2_tokenizer()
    assert tokenizer.encode(golden["text"], add_special=True, parse_special=False) == golden["ids"]
    assert tokenizer.encode(golden["text"], add_special=True, parse_special=True) == golden["ids_special"]


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: ascii(golden["text"][:30]))
def test_goldens_decode(golden) -> None:
    assert smollm2_tokenizer().decode(golden["ids"]) == golden["text"]
    assert smollm2_tokenizer().decode(golden["ids_special"]) == golden["text"]


def test_attributes_of_smollm2() -> None:
    tokenizer = smollm2_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (49152, 1, 2, False)
    assert texts(tokenizer, sorted(tokenizer.end_tokens)) == ["<|endoftext|>", "<|im_end|>"]


@given(st.text(st.characters(exclude_categories=["Cs"], min_codepoint=32), max_size=200))
def test_a_text_that_fits_is_never_refused_unread(text: str) -> None:
    tokens = smollm2_tokenizer().encode(text, add_special=True, parse_special=False)
    smollm2_tokenizer().check_length(text, len(tokens))


def test_a_text_that_cannot_fit_is_refused_unread() -> None:
    with pytest.raises(ContextExceeded, match="at least [0-9]+ tokens") as caught:
        smollm2_tokenizer().check_length("word " * 2_000_000, 8192)
    assert 8192 < caught.value.extra["n_prompt_tokens"] < 2_000_000
    smollm2_tokenizer().check_length("word " * 2_000_000, None)


def test_merges_by_hand() -> None:
    # "hello": h+e first, then l+l, then he+ll, then hell+o. " world": Ġ+w; "ow" cannot form across it.
    ids = hand_made().encode("hello world ow", add_special=False, parse_special=False)
    assert texts(hand_made(), ids) == ["hello", "Ġw", "o", "r", "l", "d", "Ġ", "ow"]


def slow_bpe(word: str, merges: list[str]) -> list[str]:
    """The definition: join the neighbours of the best rank, leftmost first, until none is left."""
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    parts = [byte_symbols()[byte] for byte in word.encode()]
    while True:
        pairs = [(ranks[pair], at) for at, pair in enumerate(zip(parts, parts[1:])) if pair in ranks]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(st.text(alphabet="abc", min_size=1, max_size=40), st.permutations(["a b", "b c", "a a", "ab c", "c a", "aa aa", "ca b", "b b"]))
def test_merging_equals_its_definition(word: str, merges: list[str]) -> None:
    usable = [merge for merge in merges if all(len(part) == 1 or part in {m.replace(" ", "") for m in merges} for part in merge.split())]
    tokenizer = Tokenizer.from_metadata(bpe_metadata(usable))
    assert texts(tokenizer, tokenizer.encode(word, add_special=False, parse_special=False)) == slow_bpe(word, usable)


@given(st.text())
def test_round_trip(text: str) -> None:
    tokenizer = hand_made()
    for parse_special in (False, True):
        assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=parse_special)) == text


def test_control_names_are_text_unless_asked_for() -> None:
    tokenizer = hand_made()
    as_text = tokenizer.encode("hello<|im_end|>", add_special=False, parse_special=False)
    as_token = tokenizer.encode("hello<|im_end|>", add_special=False, parse_special=True)
    assert "<|im_end|>" not in texts(tokenizer, as_text) and tokenizer.decode(as_text) == "hello<|im_end|>"
    assert texts(tokenizer, as_token) == ["hello", "<|im_end|>"]


def test_user_defined_tokens_are_always_found_and_unused_ones_never() -> None:
    tokenizer = hand_made()
    for parse_special in (False, True):
        ids = tokenizer.encode("<think>hello<pad>", add_special=False, parse_special=parse_special)
        assert texts(tokenizer, ids) == ["<think>", "hello", "<", "p", "a", "d", ">"]


def test_a_word_spelled_like_a_control_token_stays_text_even_where_merges_are_ignored() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(MERGES, {"stop": CONTROL}, pre="llama-bpe"))
    assert texts(tokenizer, tokenizer.encode("stop", add_special=False, parse_special=False)) == list("stop")


def test_ignore_merges_takes_a_whole_word() -> None:
    whole = bpe_metadata(["a b", "b c", "ab c"], pre="llama-bpe")
    whole["tokenizer.ggml.tokens"] = [*whole["tokenizer.ggml.tokens"], "xyz"]
    whole["tokenizer.ggml.token_type"] = [*whole["tokenizer.ggml.token_type"], 1]
    for pre, wanted in (("llama-bpe", ["xyz"]), ("qwen2", ["x", "y", "z"])):
        tokenizer = Tokenizer.from_metadata({**whole, "tokenizer.ggml.pre": pre})
        assert texts(tokenizer, tokenizer.encode("xyz", add_special=False, parse_special=False)) == wanted


def test_bos_and_eos_come_once() -> None:
    bos, eos = 265, 262
    tokenizer = hand_made(bos_token_id=bos, eos_token_id=eos, add_bos_token=True, add_eos_token=True)
    assert tokenizer.encode("hello", add_special=True, parse_special=True) == [bos, 260, eos]
    assert tokenizer.encode("<s>hello<|im_end|>", add_special=True, parse_special=True) == [bos, 260, eos]
    assert tokenizer.encode("hello", add_special=False, parse_special=True) == [260]
    assert tokenizer.encode("", add_special=True, parse_special=False) == [bos, eos]


def test_bos_where_the_file_says_nothing_is_decided_by_the_pre_tokenizer() -> None:
    assert hand_made(bos_token_id=265, pre="llama-bpe").encode("hello", add_special=True, parse_special=False) == [265, 260]
    assert hand_made(bos_token_id=265, pre="qwen2").encode("hello", add_special=True, parse_special=False) == [260]
    assert hand_made(pre="llama-bpe").encode("hello", add_special=True, parse_special=False) == [260]


def test_token_bytes_need_not_be_characters() -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode("海🦊", add_special=False, parse_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == "海🦊".encode()
    assert any(b"\xf0\x9f" in tokenizer.token_bytes(token) and len(tokenizer.token_bytes(token)) < 4 for token in ids)
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_special_tokens_can_be_left_out_of_text() -> None:
    tokenizer = smollm2_tokenizer()
    assert tokenizer.is_special(2) and not tokenizer.is_special(28120)
    assert tokenizer.decode([1, 28120, 2]) == "<|im_start|>hello<|im_end|>"
    assert tokenizer.decode([1, 28120, 2], keep_special=False) == "hello"


@pytest.mark.parametrize("token", [-1, 49152])
def test_an_unknown_id_is_the_clients_fault(token: int) -> None:
    with pytest.raises(ClientError, match="outside the vocabulary of 49152"):
        smollm2_tokenizer().decode([token])


def test_a_lone_surrogate_is_the_clients_fault() -> None:
    for parse_special in (False, True):
        with pytest.raises(ClientError, match="surrogate"):
            smollm2_tokenizer().encode("a\ud83db", add_special=False, parse_special=parse_special)


def test_several_threads_get_what_one_gets() -> None:
    tokenizer = smollm2_tokenizer()
    wanted = [golden["ids"] for golden in GOLDENS] * 4
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda golden: tokenizer.encode(golden["text"], add_special=False, parse_special=False), GOLDENS * 4))
    assert got == wanted


@pytest.mark.parametrize("name", ["tiny/llama-iq3s.gguf", "golden/qwen2.gguf"])
def test_metadata_as_the_file_reader_gives_it(name: str) -> None:
    file = GGUFFile.open(DATA / name)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    file.close()
    text = "héllo 世界 1234"
    assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False)) == text
