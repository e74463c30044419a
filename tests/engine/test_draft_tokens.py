"""Drafts never change a token: whatever is drafted, by whom, for how many slots, answers and logprobs are those without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strata.messages import NO_DRAFTS, DraftLimits, Tokens
from strata.request import Sampling
from tests.engine.drafting import Player, Talk, engine_of, exact, pages_of, rewritten

SLOTS = 8
MODEL = "glm4moe-accept-some-iq3s"
FEW = ((30, 40.0), (31, 40.0), (32, 39.0))  # answers of three tokens, which repeat themselves: for the lookup


def random_sampling(rng: np.random.Generator) -> Sampling:
    """Greedy or drawn, with and without filters, penalties, bias and logprobs."""
    def some(values: list) -> object:
        return values[int(rng.integers(len(values)))]

    return Sampling(
        temperature=some([0, 0, 0.3, 0.7, 1.0]), top_k=some([0, 0, 5]), top_p=some([1.0, 0.9]), min_p=some([0.0, 0.05]),
        presence_penalty=some([0, 0, 0.7]), frequency_penalty=some([0, 0, 0.4]), repetition_penalty=some([1.0, 1.0, 1.3]),
        logit_bias=some([(), ((30, 2.0), (31, -4.0)), FEW]), seed=int(rng.integers(1 << 40)), logprobs=some([-1, 0, 3]),
    )  # fmt: skip


def random_talk(rng: np.random.Generator, slot: int) -> Talk:
    """A prompt that repeats itself, so that a lookup finds something, and changing limits."""
    stem = rng.integers(3, 500, int(rng.integers(1, 40))).tolist()
    prompt = (stem * 4)[: int(rng.integers(1, 130))]
    limits = [DraftLimits(int(rng.integers(4)), int(rng.integers(4))) for _ in range(int(rng.integers(1, 5)))]
    return Talk(tuple(prompt), pages_of(slot, 200), random_sampling(rng), int(rng.integers(1, 30)), limits)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewritten(MODEL, tmp_path_factory.mktemp("models") / "model.gguf", exact)


@pytest.fixture(scope="module", params=[{}, {"layer_split": (2,)}, {"deterministic": True}], ids=str)
def players(request: pytest.FixtureRequest, path: Path) -> Iterator[tuple[Player, Player]]:
    """One without drafts, one with."""
    with engine_of(path, spec=1, batch=SLOTS, **request.param) as plain, engine_of(path, spec=4, batch=SLOTS, **request.param) as drafting:
        yield Player(plain), Player(drafting)


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_without_drafts(players: tuple[Player, Player], seed: int) -> None:
    """Eight slots at once against one slot after the other; a part of the drafts is spoilt, another part made right by the answers."""
    plain, drafting = players
    rng = np.random.default_rng(seed)
    alone = [random_talk(rng, slot) for slot in range(SLOTS)]
    for talk in alone:
        talk.limits = (NO_DRAFTS,)
        plain.play([talk])
    together = []
    for slot, talk in enumerate(alone):
        answer = list(talk.generated)

        def spoil(at: int, drafts: Tokens, answer: list[int] = answer) -> Tokens:
            kind = int(rng.integers(4))
            if kind == 0:
                return tuple(answer[at:at + 3])
            if kind == 1:
                return (*answer[at:at + 1], *rng.integers(3, 500, 2).tolist())
            return drafts

        limits = (DraftLimits(3, 3), DraftLimits(2, 0), DraftLimits(0, 1))
        together.append(Talk(talk.prompt, talk.pages, talk.sampling, talk.count, limits, spoil))
    drafting.play(together)
    for one, other in zip(alone, together):
        assert other.generated[:other.count] == one.generated and other.drafted >= other.accepted
        assert other.logprobs[:len(one.logprobs)] == one.logprobs
    assert sum(talk.accepted for talk in together) > 20
    assert {"mtp", "lookup", ""} == {source for talk in together for source in talk.sources}


def test_facts_and_the_time_spent_on_drafts(players: tuple[Player, Player]) -> None:
    plain, drafting = players
    assert (plain.engine.facts.max_drafts, plain.engine.facts.draft_sources, plain.engine.facts.max_rows) == (0, (), SLOTS)
    facts = drafting.engine.facts
    assert (facts.max_drafts, facts.draft_sources, facts.max_rows) == (3, ("lookup", "mtp"), SLOTS * 4)
    before = len(drafting.done)
    drafting.play([Talk((5, 6, 7), pages_of(0, 64), count=8, limits=(DraftLimits(3),))])
    for done in drafting.done[before:]:
        assert 0 < done.draft_seconds < done.stage_seconds[-1] <= done.seconds
    assert all(done.draft_seconds == 0 for done in plain.done)
