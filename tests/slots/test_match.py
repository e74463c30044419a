"""The prefix index against a plain comparison with every history."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from strata.slots.match import PrefixIndex, common_tokens, pack

TOKENS = st.lists(st.integers(0, 2), max_size=9)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "extend", "remove"]), st.integers(1, 5), TOKENS), max_size=25)


def common(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


@given(STEPS, TOKENS)
@settings(max_examples=400)
def test_matches_are_those_of_a_plain_comparison(steps: list[tuple[str, int, list[int]]], prompt: list[int]) -> None:
    index, plain = PrefixIndex(), dict[int, list[int]]()
    for action, owner, tokens in steps:
        if action == "put":
            index.put(owner, pack(tokens))
            plain[owner] = list(tokens)
        elif action == "extend" and owner in plain:
            index.extend(owner, pack(tokens))
            plain[owner] += tokens
        elif action == "remove":
            index.remove(owner)
            plain.pop(owner, None)
        for text in [prompt, *plain.values()]:
            found = [(length, owner) for length, owners in index.match(pack(text)) for owner in owners]
            lengths = [(common(text, history), owner) for owner, history in plain.items()]
            assert sorted(found) == sorted(pair for pair in lengths if pair[0])
            assert [length for length, _ in found] == sorted((length for length, _ in found), reverse=True)
        assert len(index) == len(plain)


@given(TOKENS, TOKENS, TOKENS)
def test_common_tokens_counts_whole_tokens(before: list[int], one: list[int], other: list[int]) -> None:
    assert common_tokens(pack(before + one), len(pack(before)), pack(other)) == common(one, other)


def test_tokens_that_share_bytes_are_not_the_same() -> None:
    index = PrefixIndex()
    index.put(1, pack([0x010203, 5]))
    assert index.match(pack([0x010204, 5])) == []
    assert index.match(pack([0x010203, 6])) == [(1, [1])]


def test_a_long_conversation_stays_one_node_however_many_turns_it_has() -> None:
    index = PrefixIndex()
    history: list[int] = []
    for turn in range(50):
        history += [turn] * 7
        index.put(1, pack(history))
        index.extend(1, pack([turn + 1000] * 3))
    assert index.match(pack(history)) == [(len(history), [1])]
    assert len(list(index._walk(index._root, pack(history)))) == 1
