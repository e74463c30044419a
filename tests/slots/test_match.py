"""The prefix index against a plain comparison with every history."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from strata.slots.match import PrefixIndex, _Node, common_tokens, pack

TOKENS = st.lists(st.integers(0, 2), max_size=9)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "extend", "remove"]), st.integers(1, 5), TOKENS), max_size=25)


def common(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def check_merged(node: _Node) -> None:
    """Nobody ends at, and nothing forks from, a node whose only child has the same owners: it would be one edge."""
    for child in node.children.values():
        assert child.owners and child.parent is node
        assert len(child.children) != 1 or next(iter(child.children.values())).owners != child.owners
        check_merged(child)


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
            assert found == sorted(found, key=lambda pair: (-pair[0], pair[1])), "longest first, then the eldest: no order of a set"
        assert len(index) == len(plain)
        check_merged(index._root)


@given(TOKENS, TOKENS, TOKENS)
def test_common_tokens_counts_whole_tokens(before: list[int], one: list[int], other: list[int]) -> None:
    assert common_tokens(pack(before + one), len(pack(before)), pack(other)) == common(one, other)


def test_tokens_that_share_bytes_are_not_the_same() -> None:
    index = PrefixIndex()
    index.put(1, pack([0x010203, 5]))
    assert index.match(pack([0x010204, 5])) == []
    assert index.match(pack([0x010203, 6])) == [(1, [1])]


def test_twins_that_part_after_a_while_leave_no_joint_behind() -> None:
    index = PrefixIndex()
    for owner in (1, 2):
        index.put(owner, pack([5, 5]))
    index.extend(1, pack([6, 7]))
    index.extend(2, pack([6, 8]))
    check_merged(index._root)
    assert index.match(pack([5, 5, 6, 7])) == [(4, [1]), (3, [2])]


def test_a_conversation_that_changes_sides_leaves_no_joint_behind() -> None:
    index = PrefixIndex()
    index.put(1, pack([5, 6]))
    index.put(2, pack([5, 7]))
    index.put(1, pack([5, 7, 8]))
    check_merged(index._root)
    assert index.match(pack([5, 7, 8])) == [(3, [1]), (2, [2])]


def test_a_long_conversation_stays_one_node_however_many_turns_it_has() -> None:
    index = PrefixIndex()
    history: list[int] = []
    for turn in range(50):
        history += [turn] * 7
        index.put(1, pack(history))
        index.extend(1, pack([turn + 1000] * 3))
    assert index.match(pack(history)) == [(len(history), [1])]
    assert len(list(index._walk(index._root, pack(history)))) == 1
