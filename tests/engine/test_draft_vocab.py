"""Which tokens have a place in a head's output matrix: against a slow twin, and in an engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.draft_vocab import NO_PLACE, DraftVocabulary
from strata.messages import DraftLimits
from strata.weights.writer import StoredTensor
from tests.engine.drafting import HEAD, TINY, Player, Talk, engine_of, exact, floats, pages_of, rewritten

VOCAB = 40
frequent = st.permutations(range(VOCAB)).flatmap(lambda ids: st.integers(1, VOCAB).map(lambda count: ids[:count]))
texts = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=30), max_size=12)


class Slow:
    """A list of tokens that stay and a queue of those that came in."""

    def __init__(self, ids: list[int]) -> None:
        kept = (len(ids) + 1) // 2
        self.stay, self.queue = ids[:kept], ids[kept:]

    def see(self, tokens: list[int]) -> None:
        new: list[int] = []
        for token in reversed(tokens):
            if token not in (*self.stay, *self.queue, *new) and len(new) < len(self.queue):
                new.insert(0, token)
        self.queue = (self.queue + new)[len(new):]


@given(frequent, texts)
def test_the_frequent_stay_and_the_others_are_those_seen_last(ids: list[int], windows: list[list[int]]) -> None:
    vocabulary, slow = DraftVocabulary(np.array(ids, np.int64), VOCAB), Slow(ids)
    for tokens in windows:
        before = vocabulary.ids.copy()
        places = vocabulary.see(tokens)
        slow.see(tokens)
        assert sorted(vocabulary.ids.tolist()) == sorted([*slow.stay, *slow.queue])
        assert vocabulary.ids[:len(slow.stay)].tolist() == slow.stay
        assert set(np.flatnonzero(before != vocabulary.ids)) == set(places.tolist())
        there = vocabulary.place_of != NO_PLACE
        assert np.array_equal(np.flatnonzero(there), np.sort(vocabulary.ids))
        assert np.array_equal(vocabulary.ids[vocabulary.place_of[there]], np.flatnonzero(there))


def test_a_head_drafts_what_its_texts_have_said(tmp_path: Path) -> None:
    """A perfect head, whose list holds nothing of the text: what it drafts at first is wrong, and right when the text is told again."""
    arrays = np.load(TINY / "glm4moe-accept-all-iq3s.npz")
    prompt = tuple(arrays["greedy_prompt"].tolist())
    listed = np.setdiff1d(np.arange(512), [*prompt, *arrays["greedy"]])[:128].astype(np.int32)
    path = rewritten("glm4moe-accept-all-iq3s", tmp_path / "model.gguf", lambda metadata, tensors: (
        exact(metadata, tensors), metadata.update({"strata.draft_vocab": listed})))
    with engine_of(path, spec=4) as engine:
        player, talks = Player(engine), [Talk(prompt, pages_of(slot, 64), limits=(DraftLimits(3),)) for slot in range(2)]
        for slot, talk in enumerate(talks):
            player.read(slot, talk)
            while talk.left > 0:
                player.step({slot: talk})
        source = engine._draft._sources[1]  # type: ignore[union-attr]
        vocabulary, block = source._choose.vocabulary, source._blocks[0]  # type: ignore[attr-defined]
        assert np.array_equal(block.output.weights, block.model.output.weights[vocabulary.ids])
    first, second = talks
    assert first.generated == second.generated == arrays["greedy"][:len(first.generated)].tolist()
    assert first.accepted < second.accepted == second.drafted


def test_every_head_takes_up_rows_of_its_own_output_matrix(tmp_path: Path) -> None:
    rows = np.random.default_rng(3).standard_normal((2, 512, 256)).astype(np.float32)

    def two_heads(metadata: dict[str, object], tensors: dict[str, StoredTensor]) -> None:
        exact(metadata, tensors)
        metadata["strata.draft_vocab"] = np.arange(100, 108, dtype=np.int32)
        for name in [name for name in tensors if name.startswith(HEAD)]:
            tensors["blk.5." + name[len(HEAD):]] = tensors[name]
        for block in (4, 5):
            tensors[f"blk.{block}.nextn.shared_head_head.weight"] = floats(rows[block - 4])

    with engine_of(rewritten("glm4moe-accept-all-iq3s", tmp_path / "model.gguf", two_heads), spec=4) as engine:
        Player(engine).play([Talk((5, 6, 7, 8), pages_of(0, 64), limits=(DraftLimits(3),))])
        source = engine._draft._sources[1]  # type: ignore[union-attr]
        ids = source._choose.vocabulary.ids  # type: ignore[attr-defined]
        assert set(ids[:4]) == set(range(100, 104)) and not set(ids[4:]) & set(range(100, 108))
        for number, block in enumerate(source._blocks):  # type: ignore[attr-defined]
            assert np.array_equal(block.output.weights, rows[number][ids])
