"""Marks: whatever text goes in comes out, and in between no name stands whole, alone or together with its neighbours."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from strata.text.protect import Protector, unmark

NAMES = ["<|im_end|>", "<|im_start|>", "</s>", "[INST]", "aab", "bc", "x"]
GUARD = Protector(NAMES)
PIECES = st.sampled_from([*NAMES, "<|im", "_end|>", "a", "ab", "b", "c", "<", ">", "\ufdd0", "0", "1", "2", ";", " ", "é"])
TEXTS = st.lists(PIECES, max_size=8).map("".join)


def holds_a_name(text: str) -> bool:
    return any(name in text for name in NAMES)


@given(TEXTS)
def test_every_text_comes_back(text: str) -> None:
    assert unmark(GUARD.mark(text)) == text


@given(TEXTS)
def test_no_name_stands_in_a_marked_text(text: str) -> None:
    assert not holds_a_name(GUARD.mark(text))


@given(st.lists(TEXTS, max_size=4))
def test_marked_texts_make_no_name_together(texts: list[str]) -> None:
    together = "".join(map(GUARD.mark, texts))
    assert not holds_a_name(together)
    assert unmark(together) == "".join(texts)


@given(st.text())
def test_any_unicode_comes_back(text: str) -> None:
    assert unmark(GUARD.mark(text)) == text


def test_text_without_names_is_left_as_it_is() -> None:
    plain = "An ordinary < sentence >, [with] brackets | and bars."
    assert Protector(["<|im_end|>"]).mark(plain) == plain
    assert Protector([]).mark("<|im_end|>") == "<|im_end|>"


def test_structures_are_marked_through_and_through() -> None:
    value = {"a</s>": ["</s>", {"b": "</s>"}, 3, None, True]}
    marked = GUARD.mark(value)
    assert not holds_a_name(json.dumps(marked, ensure_ascii=False).replace("x", ""))
    assert json.loads(unmark(json.dumps(marked, ensure_ascii=False))) == value
    assert [marked[key][2:] for key in marked] == [[3, None, True]]
