"""Finding special tokens, against looking for each of them at each place."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import ModelError
from strata.text.specials import SpecialTokens, trie_pattern

NAMES = st.lists(st.text(alphabet="<|a>", min_size=1, max_size=5), unique=True, max_size=12)


def slow_split(text: str, names: list[str]) -> list[tuple[int, int, int | None]]:
    pieces: list[tuple[int, int, int | None]] = []
    at = plain = 0
    while at < len(text):
        found = max((name for name in names if text.startswith(name, at)), key=len, default=None)
        if found is None:
            at += 1
            continue
        if at > plain:
            pieces.append((plain, at, None))
        pieces.append((at, at + len(found), names.index(found)))
        at = plain = at + len(found)
    return pieces + ([(plain, at, None)] if at > plain else [])


@given(st.text(alphabet="<|a>b", max_size=30), NAMES)
def test_equals_the_slow_way(text: str, names: list[str]) -> None:
    tokens = SpecialTokens({name: number for number, name in enumerate(names)})
    assert list(tokens.split(text)) == slow_split(text, names)


@given(NAMES, st.text(alphabet="<|a>", max_size=6))
def test_a_trie_matches_exactly_its_words(words: list[str], text: str) -> None:
    if words:
        assert bool(re.fullmatch(trie_pattern(sorted(words)), text)) == (text in words)


def test_names_are_not_patterns() -> None:
    assert list(SpecialTokens({"[.*]": 7, "a|b": 8}).split("[.*]xa|b")) == [(0, 4, 7), (4, 5, None), (5, 8, 8)]


def test_many_names_cost_no_more_than_a_few() -> None:
    """Steps are not timed but counted: a text of openings is refused by the trie at its second character."""
    few = SpecialTokens({"<|0|>": 0})
    many = SpecialTokens({f"<|reserved_{number}|>": number for number in range(5000)})
    text = "<" * 200_000
    assert list(few.split(text)) == list(many.split(text)) == [(0, 200_000, None)]


def test_runs_of_spaces_nest() -> None:
    runs = SpecialTokens({" " * length: length for length in range(2, 100)})
    pieces = list(runs.split("a" + " " * 99 + "b" + " " * 150))
    assert pieces == [(0, 1, None), (1, 100, 99), (100, 101, None), (101, 200, 99), (200, 251, 51)]


def test_names_that_nest_too_deeply_are_refused() -> None:
    with pytest.raises(ModelError, match="too many special tokens begin with one another"):
        SpecialTokens({"a" * length: length for length in range(1, 300)})
