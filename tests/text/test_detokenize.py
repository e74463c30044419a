"""The way out: whole characters, stop strings, held text; against the slow statement of each rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import ClientError
from strata.text.detokenize import Detokenizer
from strata.text.stops import StopFilter
from strata.text.tokenizer import Tokenizer
from tests.text.vocabularies import CONTROL, bpe_metadata, smollm2_tokenizer

BYTES = Tokenizer.from_metadata(bpe_metadata([], {"<|im_end|>": CONTROL}))


def run(tokenizer: Tokenizer, ids, **options) -> tuple[list[str], Detokenizer]:
    out = Detokenizer(tokenizer, **options)
    return [out.push(token) for token in ids] + [out.flush()], out


@pytest.mark.parametrize("text", ["🦊", "海", "a海🦊é\u0301", "e\u200d👨\u200d👩"])
def test_no_character_is_split(text: str) -> None:
    chunks, _ = run(BYTES, text.encode())
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks)
    assert [len(chunk) for chunk in chunks if chunk] == [1] * len(text)


def test_real_tokens_that_split_a_character() -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode("🦊海", add_special=False, parse_special=False)
    chunks, _ = run(tokenizer, ids)
    assert len(ids) > 2 and "".join(chunks) == "🦊海" and "\ufffd" not in "".join(chunks)


def test_an_unfinished_character_becomes_a_replacement_mark_at_the_end() -> None:
    chunks, _ = run(BYTES, "ab海".encode()[:-1])
    assert chunks == ["a", "b", "", "", "\ufffd"]


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_give_what_decoding_them_at_once_gives(data: list[int]) -> None:
    chunks, _ = run(BYTES, data)
    assert "".join(chunks) == bytes(data).decode("utf-8", "replace")


def test_special_tokens_are_hidden_unless_kept() -> None:
    assert "".join(run(BYTES, [104, 256, 105])[0]) == "hi"
    assert "".join(run(BYTES, [104, 256, 105], keep_special=True)[0]) == "h<|im_end|>i"
    # A hidden token does not tear a character apart.
    first, second, third = "海".encode()
    assert "".join(run(BYTES, [first, 256, second, third])[0]) == "海"


def test_a_stop_string_over_two_tokens() -> None:
    out = StopFilter(["amber kite"])
    assert (out.push("the amber"), out.push(" kite flew"), out.stopped) == ("the ", "", "amber kite")
    assert (out.push("more"), out.flush()) == ("", "")


def test_held_text_is_given_at_the_end() -> None:
    out = StopFilter(["kite!"])
    assert (out.push("red ki"), out.flush(), out.flush(), out.stopped) == ("red ", "ki", "", None)


def test_only_what_may_become_a_stop_is_held() -> None:
    out = StopFilter(["abac", "bad"])
    assert [out.push(char) for char in "abaxabab"] == ["", "", "", "abax", "", "", "", "ab"]


def test_the_first_to_end_wins_and_the_longest_of_those() -> None:
    inner = StopFilter(["abcd", "bc"])
    assert (inner.push("xabcd"), inner.stopped) == ("xa", "bc")
    suffix = StopFilter(["c", "abc"])
    assert (suffix.push("xabc"), suffix.stopped) == ("x", "abc")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ClientError, match="must not be empty") as error:
        StopFilter(["a", ""])
    assert error.value.param == "stop"


def slow_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule as it is stated: the stop whose end comes first; of those that end there, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


CUTS = st.lists(st.integers(1, 4), max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=6)


@given(st.text(alphabet="abc", max_size=60), STOPS, CUTS)
def test_any_cut_gives_the_slow_answer(text: str, stops: list[str], cuts: list[int]) -> None:
    out, got, rest = StopFilter(stops), "", text
    for cut in [*cuts, len(text)]:
        piece, rest = rest[:cut], rest[cut:]
        got += out.push(piece)
    got += out.flush()
    assert (got, out.stopped) == slow_stop(text, stops)


@given(st.text(alphabet="abc", max_size=60), STOPS)
def test_nothing_more_is_held_than_must_be(text: str, stops: list[str]) -> None:
    out, given_out = StopFilter(stops), 0
    for end in range(1, len(text) + 1):
        given_out += len(out.push(text[end - 1]))
        if out.stopped:
            break
        must = max((n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])), default=0)
        assert end - given_out == must


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=4))
def test_tokens_and_stops_together(text: str, stops: list[str]) -> None:
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    chunks, out = run(tokenizer, ids, stops=stops)
    assert ("".join(chunks), out.stopped) == slow_stop(tokenizer.decode(ids), stops)


def test_many_long_stops_cost_one_step_a_character() -> None:
    steps = 0

    class Counted(StopFilter):
        def _step(self, char: str) -> int:
            nonlocal steps
            steps += 1
            return super()._step(char)

    out = Counted(["a" * 500 + str(number) for number in range(100)])
    text = "a" * 20_000
    assert "".join(out.push(char) for char in text) + out.flush() == text
    assert steps == len(text)
