"""Drafts from a slot's own text: the longest earlier match, of equal ones the latest, as a loop over all of them finds it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.draft import Ask
from strata.engine.lookup import MOST, Lookup, Text, continuation
from strata.messages import DraftLimits, Segment, SegmentResult, Tokens, Window
from strata.request import Sampling

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def slow(tokens: list[int], least: int, count: int) -> Tokens:
    """Every earlier place, by how many tokens before it are the last ones."""
    end, best, found = len(tokens), 0, -1
    for place in range(end - 1):
        length = 0
        while length < min(MOST, place + 1) and tokens[place - length] == tokens[end - 1 - length]:
            length += 1
        if length >= max(best, 1):
            best, found = length, place
    if best < least:
        return ()
    text = list(tokens)
    for at in range(count):
        text.append(text[found + 1 + at])
    return tuple(text[end:])


@given(TEXTS, st.integers(1, 4), st.integers(1, 7))
def test_it_is_what_a_loop_finds(tokens: list[int], least: int, count: int) -> None:
    assert continuation(np.array(tokens, np.int32), least, count) == slow(tokens, least, count)


@pytest.mark.parametrize("tokens, drafts", [
    ([1, 2, 3, 4, 5, 6, 1, 2, 3], (4, 5, 6, 1)),
    ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], (8, 1, 2, 3)),  # of equal ones the latest
    ([7, 1, 2, 3, 9, 0, 1, 2, 3, 8, 7, 1, 2, 3], (9, 0, 1, 2)),  # the longer one before the later one
    ([5, 5, 5, 5], (5, 5, 5, 5)),  # on into its own continuation
    ([1, 2, 9, 1, 2], ()),  # too short
    ([1], ()),
])  # fmt: skip
def test_examples(tokens: list[int], drafts: Tokens) -> None:
    assert continuation(np.array(tokens, np.int32), 3, 4) == drafts


@given(TEXTS, st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=12))
def test_a_text_grows_by_what_is_new(prompt: list[int], windows: list[list[int]]) -> None:
    """The picks of one window are part of the answer at the next."""
    text, generated = Text(tuple(prompt)), list[int]()
    for picks in windows:
        assert text.grown(generated, tuple(picks)).tolist() == [*prompt, *generated, *picks]
        generated += picks


def ask(slot: int, prompt: Tokens, generated: list[int], picks: Tokens, limits: DraftLimits, name: str = "r") -> Ask:
    segment = Segment(f"{name}{slot}", slot, 0, (0,), (0,), Sampling(temperature=0), history=(prompt, generated), draft_limits=limits)
    return Ask(segment, picks, limits.lookup)


def test_slots_have_their_own_text_and_the_next_request_a_new_one() -> None:
    lookup = Lookup()
    first, second = (1, 2, 3, 4, 1, 2), (7, 8, 9, 7, 8)
    limits = DraftLimits(mtp=3, lookup=2)
    assert lookup.propose([ask(0, first, [], (3,), limits), ask(1, second, [], (9,), limits)]) == [(4, 1), (7, 8)]
    assert lookup.propose([ask(0, first, [3], (4,), limits)]) == [(1, 2)]
    assert lookup.propose([ask(0, second, [], (9,), limits)]) == [(7, 8)]


def test_another_choice_of_the_same_prompt_is_another_text() -> None:
    """Choices of one request share their prompt; the second is asked for drafts when it has said something else already."""
    lookup, prompt, limits = Lookup(), (1, 2, 3), DraftLimits(lookup=2)
    assert lookup.propose([ask(0, prompt, [5, 6, 7, 5], (6,), limits)]) == [(7, 5)]
    assert lookup.propose([ask(0, prompt, [8, 9, 4, 8], (9,), limits, "s")]) == [(4, 8)]


def test_without_a_head_to_ask_shorter_matches_count() -> None:
    prompt = (1, 2, 3, 9, 1)
    assert Lookup().propose([ask(0, prompt, [], (2,), DraftLimits(mtp=1, lookup=3))]) == [()]
    assert Lookup().propose([ask(0, prompt, [], (2,), DraftLimits(lookup=3))]) == [(3, 9, 1)]


COPY = tuple(range(20)) * 2  # its last tokens occurred 20 places before
CHANCE = (*range(30), 3, 4, 5)  # a match of three tokens


def test_a_chain_grows_the_match_and_drawn_ones_are_others() -> None:
    """A match of three: its first drafts are right, its fourth, by then at a match of six, is not."""
    lookup, limits = Lookup(), DraftLimits(mtp=3, lookup=8)
    for number in range(60):
        asked = ask(0, CHANCE[:-1], [], CHANCE[-1:], limits, f"{number}")
        drafts, = lookup.propose([asked])
        check(lookup, asked, drafts, min(3, len(drafts)))
    assert [lookup.trust.chance(sort) > 0.9 for sort in (2, 3, 4, 5)] == [True, True, True, False]
    longer = ask(0, tuple(range(30)) + (2, 3, 4), [], (5,), limits, "longer")  # a match of four
    assert [len(drafts) for drafts in lookup.propose([asked]) + lookup.propose([longer])] == [3, 2]
    drawn = replace(asked, segment=replace(asked.segment, sampling=Sampling(temperature=1.0)))
    assert len(lookup.propose([drawn])[0]) == 8


def check(lookup: Lookup, asked: Ask, drafts: Tokens, accepted: int) -> None:
    """The slot's next window holds ``drafts``, and so many of them are right."""
    segment = Segment(asked.segment.request_id, asked.segment.slot, 0, (0, *drafts), (0,), Sampling(), num_drafts=len(drafts))
    picks = (*drafts[:accepted], 0)
    lookup.observe(Window(0, "decode", 0, (segment,)), (SegmentResult(picks, accepted=accepted),))


def test_what_short_matches_bring_is_learnt_apart_from_long_ones() -> None:
    """Short matches that go on wrong are drafted less and less; a long one, and a short one that has grown long, to the limit."""
    lookup, limits, given = Lookup(), DraftLimits(mtp=3, lookup=8), []
    for number in range(60):
        short = ask(0, CHANCE[:-1], [], CHANCE[-1:], limits, f"short{number}")
        long = ask(1, COPY[:-1], [], COPY[-1:], limits, f"long{number}")
        drafts = lookup.propose([short, long])
        assert drafts[1] == tuple(range(8))
        given.append(len(drafts[0]))
        check(lookup, long, drafts[1], 8)
        check(lookup, short, drafts[0], 0)
    first = given.index(0)
    assert set(given[:first]) == {8} and first < 50 and sum(count > 0 for count in given[first:]) <= 1, given


def test_a_draft_that_was_never_checked_teaches_nothing() -> None:
    """The next window of the slot is another request's, holds other drafts, or failed."""
    lookup, limits = Lookup(), DraftLimits(lookup=8)
    for number in range(40):
        asked = ask(0, CHANCE[:-1], [], CHANCE[-1:], limits, f"{number}")
        drafts, = lookup.propose([asked])
        assert len(drafts) == 8
        other = (ask(0, (1,), [], (1,), limits, "other"), drafts), (asked, (7, *drafts[1:])), (asked, ())
        check(lookup, *other[number % 3], accepted=0)
