"""What a head keeps lies in a slot's pages and goes where they go; it writes to no others."""

from __future__ import annotations

from collections.abc import Iterator
import numpy as np
import pytest

from strata.engine.draft_trust import Trust
from strata.engine.mtp import MOST_KEPT
from strata.engine.mtp_numpy import NumpyMtp
from strata.engine.page_hidden import PageHidden, PagesWithHidden
from strata.messages import CopyDone, DraftLimits, PageCopy, Window
from tests.engine.drafting import PAGE, TINY, Player, Talk, engine_of, pages_of

MODEL = TINY / "glm4moe-iq3s.gguf"  # of random weights: what its head drafts depends on every hidden state
ON, OFF = (DraftLimits(mtp=3),), (DraftLimits(),)


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trust, "is_worth", lambda self, chance, sort: True)
    monkeypatch.setattr(Trust, "goes_on", lambda self, chance: True)


@pytest.fixture
def player() -> Iterator[Player]:
    with engine_of(MODEL, spec=4) as engine:
        yield Player(engine)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Window]:
    """What the head was given."""
    seen: list[Window] = []
    run = NumpyMtp.run

    def watched(self, window, hidden, wanted):
        assert sum(len(segment.tokens) for segment in window.segments) == len(hidden)
        seen.append(window)
        return run(self, window, hidden, wanted)

    monkeypatch.setattr(NumpyMtp, "run", watched)
    return seen


def prompt(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 500, count).tolist())


def first_drafts(player: Player, talk: Talk, slot: int, start: int = 0) -> tuple[int, ...]:
    player.read(slot, talk, start)
    return talk.drafts


@pytest.mark.parametrize("shared", [PAGE, 2 * PAGE])
def test_borrowed_pages_bring_what_a_head_needs(player: Player, shared: int) -> None:
    """A request that takes over another's full pages drafts what it would have, had it read them itself."""
    text = prompt(150)
    whole = first_drafts(player, Talk(text, pages_of(0, 150), limits=ON), 0)
    borrowed = (*pages_of(0, 150)[: shared // PAGE], *pages_of(1, 150)[shared // PAGE:])
    assert first_drafts(player, Talk(text, borrowed, limits=ON), 1, shared) == whole
    assert len(whole) == 3


def test_a_conversation_goes_on_at_its_live_end_in_another_slot(player: Player) -> None:
    first = Talk(prompt(30), pages_of(0, 100), count=11, limits=ON)
    player.play([first])
    held = (*first.prompt, *first.generated[:-1])
    longer = (*held, *prompt(20, 1))
    goes_on = first_drafts(player, Talk(longer, pages_of(0, 100), limits=ON), 3, len(held))
    assert goes_on == first_drafts(player, Talk(longer, pages_of(1, 100), limits=ON), 1)


def test_parked_pages_come_back_with_it(player: Player) -> None:
    text = prompt(128 + 22)
    whole, stage = first_drafts(player, Talk(text, pages_of(0, 150), limits=ON), 0), player.engine.stages[-1].model
    assert isinstance(stage, PagesWithHidden)
    states = stage.hidden.states[:2].copy()
    player.engine.copy(PageCopy(1, "out", 7, (0, 1, 2)))
    assert player.events.get(timeout=300) == CopyDone(1)
    first_drafts(player, Talk(prompt(150, 2), pages_of(0, 150), limits=ON), 0)
    player.engine.copy(PageCopy(2, "in", 7, (9, 8)))
    assert player.events.get(timeout=300) == CopyDone(2)
    assert np.array_equal(stage.hidden.states[[9, 8]], states) and states.any(axis=1).all()
    assert first_drafts(player, Talk(text, (9, 8, 10), limits=ON), 2, 128) == whole


def test_rows_are_kept_back_while_no_drafts_are_wanted(player: Player, runs: list[Window]) -> None:
    """Then they are written together, and the drafts are those of a head that was never off."""
    off, on = Talk(prompt(20), pages_of(0, 64), count=30, limits=OFF), Talk(prompt(20), pages_of(1, 64), count=30, limits=ON)
    player.read(0, off)
    player.read(1, on)
    runs.clear()
    for _ in range(9):
        player.step({0: off})
    assert runs == [], "20 and 9 rows are fewer than are written unasked"
    off.limits = ON
    player.step({0: off})
    assert len(runs[0].segments[0].tokens) == 20 + 10 + 1 and runs[0].segments[0].start == 0
    while len(on.generated) < len(off.generated):
        on.drafts = tuple(off.generated[len(on.generated):-1][:3])
        player.step({1: on})
    assert on.generated == off.generated and on.drafts == off.drafts


def test_not_for_ever(player: Player, runs: list[Window]) -> None:
    talk = Talk(prompt(100), pages_of(0, 200), count=MOST_KEPT + 20, limits=OFF)
    player.read(0, talk)
    assert [len(segment.tokens) for window in runs for segment in window.segments] == [100]
    runs.clear()
    for _ in range(MOST_KEPT + 5):
        player.step({0: talk})
    assert [(segment.start, len(segment.tokens)) for window in runs for segment in window.segments] == [(100, MOST_KEPT)]


def test_one_step_serves_all_slots(player: Player, runs: list[Window]) -> None:
    talks = {slot: Talk(prompt(10 + slot, slot), pages_of(slot, 64), limits=ON) for slot in range(4)}
    for slot, talk in talks.items():
        player.read(slot, talk)
    runs.clear()
    player.step(talks)
    assert [len(window.segments) for window in runs] == [4, 4, 4]
    assert all(talk.sources[-1] == "mtp" for talk in talks.values())


def test_only_the_slots_own_pages_are_written(player: Player) -> None:
    """Not even for drafts near the end of the last page: those are fewer."""
    stage = player.engine.stages[-1].model
    assert isinstance(stage, PagesWithHidden)
    kv = stage.model.kv
    kv.data.fill(7)
    stage.hidden.states.fill(7)
    talk = Talk(prompt(PAGE - 10), (3,), count=40, limits=ON)
    player.read(0, talk)
    given = []
    while (room := PAGE + 1 - len(talk.prompt) - len(talk.generated)) > 0:
        given.append((room, len(talk.drafts)))
        talk.drafts = talk.drafts[:room - 1]  # the machine cuts what has no page
        player.step({0: talk})
    assert all(drafts == min(3, room) for room, drafts in given) and min(given)[1] < 3
    others = [page for page in range(kv.num_pages) if page != 3]
    assert (kv.data[:, :, others] == 7).all() and (stage.hidden.states[others] == 7).all()
    assert not (kv.data[-1, :, 3] == 7).any()


def test_the_last_hidden_state_of_each_page() -> None:
    states = np.arange(1, 11, dtype=np.float32)[:, None] * np.ones((1, 2), np.float32)
    pages = PageHidden(6, 4, 2)
    pages.store((5, 2, 0), 0, states[:3])
    assert pages.before((5, 2, 0), 0).tolist() == [[0, 0]]
    assert pages.before((5, 2, 0), 3).tolist() == [[3, 3]]
    pages.store((5, 2, 0), 3, states[3:10])
    assert [pages.before((5, 2, 0), end)[0, 0] for end in (4, 8, 10)] == [4, 8, 10]
    assert pages.states[[1, 3, 4]].sum() == 0
