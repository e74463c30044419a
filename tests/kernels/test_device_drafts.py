"""Drafts of a head on a device, through the real engine: every draft of a perfect head accepted, no token changed, and a state
that does not depend on how a slot came to its place: rows kept back, chunks, pages moved, another request."""

from contextlib import contextmanager

import numpy as np
import pytest

from strata.engine.device_chain import placed
from strata.kernels.sample import History, choices_of
from strata.messages import NO_DRAFTS, DraftLimits, PageCopy, Segment, SegmentResult, Window
from strata.request import Sampling
from tests.engine.drafting import TINY, Player, Talk, engine_of, exact, rewritten
from tests.engine.running import ids
from tests.engine.test_draft_counts import two_random_heads
from tests.kernels.devices import ENGINE_DEVICE

pytestmark = pytest.mark.cxx
GLM = TINY / "glm4moe-iq3s.gguf"
MTP = (DraftLimits(3, 0),)
PROMPT = ids(np.random.default_rng(5).integers(3, 500, 41))


@contextmanager
def players(path=GLM, **settings):
    """An engine that makes every draft it can, whatever it has learnt of them."""
    with engine_of(path, **{"device": ENGINE_DEVICE, "spec": 4, "chunk": 64, "context": 256, "batch": 4, **settings}) as engine:
        player = Player(engine)
        player.mtp = engine.stages[-1].model.mtp
        if player.mtp is not None:
            player.mtp.trust.least = 0
        yield player


@pytest.fixture(scope="module")
def player():
    with players() as player:
        yield player


@pytest.fixture(scope="module")
def perfect(tmp_path_factory):
    return rewritten("glm4moe-accept-all-iq3s", tmp_path_factory.mktemp("perfect") / "m.gguf", exact)


def pages_of(slot):
    return 4 * slot, 4 * slot + 1, 4 * slot + 2, 4 * slot + 3


def test_every_draft_of_a_perfect_head_is_accepted(perfect):
    golden = np.load(TINY / "glm4moe-accept-all-iq3s.npz")
    with players(perfect) as player:
        talks = [Talk(ids(golden["greedy_prompt"]), pages_of(slot), limits=MTP, count=21) for slot in range(2)]
        player.play(talks)
    for talk in talks:
        assert tuple(talk.generated) == ids(golden["greedy"])[:21]
        assert talk.drafted == talk.accepted == 15 and talk.windows == 5  # one token each beside its drafts, and the prompt's


def test_tokens_are_those_without_drafts(player, perfect):
    """Greedy and drawn, with penalties, in windows together, drafts on and off, spoilt drafts among them."""
    samplings = [
        Sampling(temperature=0), Sampling(temperature=0.8, seed=3), Sampling(temperature=0.7, seed=9, top_k=20, repetition_penalty=1.2),
        Sampling(temperature=0.9, seed=4, logit_bias=((17, 3.0),)),
    ]  # fmt: skip
    limits = [(DraftLimits(3, 3),), (DraftLimits(2, 0), NO_DRAFTS), MTP, (NO_DRAFTS, NO_DRAFTS, DraftLimits(1, 0))]

    def talks(limits):
        spoil = lambda at, drafts: drafts[:1] + tuple((token + at) % 512 for token in drafts[1:])  # noqa: E731
        return [
            Talk(PROMPT[: 9 + 5 * slot], pages_of(slot), sampling, count=9, limits=limit, spoil=spoil)
            for slot, (sampling, limit) in enumerate(zip(samplings, limits))
        ]  # fmt: skip

    drafting, plain = talks(limits), talks([(NO_DRAFTS,)] * 4)
    player.play(drafting)
    with players(spec=1) as without:
        assert without.mtp is None and without.engine.facts.max_drafts == 0
        without.play(plain)
    assert [talk.generated[:9] for talk in drafting] == [talk.generated[:9] for talk in plain]
    assert all(talk.drafted > 0 for talk in drafting)


def last_drafts(player, slot, count, on, chunk=64):
    """(tokens, drafts) of a greedy talk of ``count`` tokens that asks for drafts after those where ``on(tokens so far)``, and at its end;
    none is verified."""
    talk = Talk(PROMPT[:27], pages_of(slot), count=99, limits=(NO_DRAFTS,))
    player.read(slot, talk, chunk=chunk)
    while len(talk.generated) < count:
        talk.drafts, talk.limits = (), MTP if on(len(talk.generated)) or len(talk.generated) == count - 1 else (NO_DRAFTS,)
        player.step({slot: talk})
    return talk.generated, talk.drafts


def test_rows_kept_back_and_prompts_in_chunks_end_in_the_same_state(player):
    """Off for longer than rows are kept (27 of the prompt, 5 more), or for a while; a prompt's cells written at once or chunk by chunk."""
    always = last_drafts(player, 0, 8, lambda count: True)
    assert len(always[1]) == 3
    others = [(lambda count: False, 64), (lambda count: count % 3 == 0, 64), (lambda count: False, 11)]
    for slot, (on, chunk) in enumerate(others, start=1):
        assert last_drafts(player, slot, 8, on, chunk) == always


def test_cells_of_long_prompts_and_short_ones_are_the_same(player):
    """41 rows at once, without a graph, or in chunks."""
    found = []
    for slot, chunk in enumerate((64, 16, 40)):
        talk = Talk(PROMPT, pages_of(slot), count=99, limits=MTP)
        player.read(slot, talk, chunk=chunk)
        found.append(talk.drafts)
    assert len(found[0]) == 3 and found[0] == found[1] == found[2]


def hidden_rows(player, first, count=1):
    """Of the store, as it is now."""
    ops, rows = player.mtp._runner.ops, np.empty((count, 256), np.float32)
    ops.ops.device.download(rows, ops.space.store.rows(first, first + count), ops.ops.stream)
    ops.ops.stream.synchronize()
    return rows


def test_another_request_goes_on_where_pages_went(player, monkeypatch):
    """The hidden row before a resumed history comes with its pages, parked and restored elsewhere; at a page's end and within one."""
    fill, used = player.mtp._runner.fill, {}

    def watched(rows):
        used.update({position: hidden_rows(player, source) for _, position, _, source in rows[:1] if source >= 0})
        fill(rows)

    monkeypatch.setattr(player.mtp._runner, "fill", watched)
    talk = Talk(PROMPT, pages_of(0), count=99, limits=MTP)
    player.read(0, talk)
    talk.prompt = PROMPT + PROMPT[:24]
    talk.generated.clear()
    player.read(0, talk, start=41)
    talk.drafts = ()
    player.step({0: talk})
    text = (*talk.prompt, *talk.generated)
    again = Talk(text, pages_of(3), count=99, limits=MTP)
    player.read(3, again, chunk=64)
    before = hidden_rows(player, player.mtp._space.pages_at + pages_of(0)[0], 2)
    player.engine.copy(PageCopy(1, "out", 1, pages_of(0)[:2]))
    assert player.events.get(timeout=60).error == ""
    for start in (64, len(text) - 1):
        player.engine.copy(PageCopy(2, "in", 1, (9, 10)))
        assert player.events.get(timeout=60).error == ""
        other = Talk(text, (9, 10, 11), count=99, limits=MTP)
        player.read(2, other, start=start)
        np.testing.assert_array_equal(used[start][0], before[(start - 1) // 64])
        assert len(other.drafts) == 3 and (other.generated, other.drafts) == (again.generated, again.drafts)
    player.engine.copy(PageCopy(3, "drop", 1))


@pytest.mark.skipif(ENGINE_DEVICE == "cuda", reason="only the emulated device counts launches")
def test_a_chain_is_read_once_and_allocates_nothing(player, monkeypatch):
    """Two waits a window: for its picks, and for its drafts; beside its graphs the one that picks, and one that moves hidden rows."""
    model = player.engine.stages[-1].model
    device, stream = model.ops.device, model.ops.stream
    talk = Talk(PROMPT, pages_of(0), count=99, limits=MTP)
    player.read(0, talk)
    for _ in range(4):
        talk.drafts = ()
        player.step({0: talk})
    waits = []
    synchronize = type(stream).synchronize
    monkeypatch.setattr(type(stream), "synchronize", lambda self: waits.append(1) or synchronize(self))
    free, launches = device.memory().free, device.num_launches
    talk.drafts = ()
    player.step({0: talk})
    assert len(talk.drafts) == 3 and len(waits) == 2
    assert device.memory().free == free and device.num_launches - launches == 2


def test_a_head_of_some_tokens_drafts_those_and_draws_as_the_target_would(perfect, tmp_path):
    """Every other token can be drafted: what is accepted are drafts that the whole head makes, too."""
    golden = np.load(TINY / "glm4moe-accept-all-iq3s.npz")
    listed = np.random.default_rng(0).permutation(512)[:200].astype(np.int32)

    def change(metadata, tensors):
        exact(metadata, tensors)
        metadata["strata.draft_vocab"] = listed

    path = rewritten("glm4moe-accept-all-iq3s", tmp_path / "some.gguf", change)
    sampling = Sampling(temperature=0.6, seed=11, logit_bias=((300, -1.0),))
    with players(path, draft_vocab=150) as player:
        greedy = Talk(ids(golden["greedy_prompt"]), pages_of(0), count=12, limits=MTP)
        drawn = Talk(ids(golden["greedy_prompt"]), pages_of(1), sampling, count=12, limits=MTP)
        seen = []
        for talk in (greedy, drawn):
            talk.spoil = lambda at, drafts: seen.extend(drafts) or drafts
        player.play([greedy, drawn])
    assert seen and set(seen) <= set(listed[:150].tolist())
    following = dict(zip(ids(golden["greedy"]), ids(golden["greedy"])[1:]))
    wanted = sum(following[token] in listed[:150] for token in greedy.generated[:-1])
    assert 0 < greedy.accepted <= wanted and drawn.accepted > 0


def test_what_a_request_says_of_tokens_is_said_of_their_places():
    """Entries of tokens that the head does not know are left out; rows keep their own."""
    samplings = [
        Sampling(logit_bias=((4, 1.5), (5, 9.0), (300, -2.0))), Sampling(), Sampling(repetition_penalty=2.0, logit_bias=((9, 3.0),)),
    ]  # fmt: skip
    histories = [History(), History(), History((300, 7), [400, 400])]
    choices = choices_of([(sampling, 20, history) for sampling, history in zip(samplings, histories)], 512)
    vocabulary = np.array([4, 9, 300, 400])
    found = placed(choices, vocabulary)
    assert found.first_entry.tolist() == [0, 2, 2, 5]
    tokens = [vocabulary[found.entry_ints[first:end, 0]].tolist() for first, end in ((0, 2), (2, 5))]
    assert [sorted(each) for each in tokens] == [[4, 300], [9, 300, 400]]
    assert dict(zip(tokens[0], found.entry_bias[:2].tolist())) == {4: 1.5, 300: -2.0}


def test_each_step_draws_with_the_noise_of_its_own_position(perfect):
    """So a head that is always right is right for drawn tokens, too, at every depth."""
    golden, sampling = np.load(TINY / "glm4moe-accept-all-iq3s.npz"), Sampling(temperature=0.6, seed=11)
    with players(perfect) as player:
        talk = Talk(ids(golden["greedy_prompt"]), pages_of(0), sampling, count=21, limits=MTP)
        player.play([talk])
    assert talk.accepted >= 0.9 * talk.drafted and len(set(talk.generated)) > 2


def test_drafts_end_with_the_pages_and_wrong_ones_are_learnt_from(player):
    """One page of 64: behind token 60 there is room for three drafts, then for fewer; of random weights, so that most are wrong."""
    trust = player.mtp.trust
    before, first = (sum(trust._right), sum(trust._tried)), len(player.windows)
    talk, given = Talk((PROMPT * 2)[:56], (15,), count=40, limits=MTP), []
    player.read(3, talk)
    while (room := 65 - len(talk.prompt) - len(talk.generated)) > 0:
        given.append((room, len(talk.drafts)))
        talk.drafts = talk.drafts[: room - 1]
        player.step({3: talk})
    assert all(drafts == min(3, room) for room, drafts in given) and given[-1][1] < 3
    pairs = zip(player.windows[first:], player.done[first:])
    checks = [(window.segments[0].num_drafts, done.results[0].accepted) for window, done in pairs]
    wrong = sum(accepted < drafts for drafts, accepted in checks)
    after = sum(trust._right), sum(trust._tried)
    assert (after[0] - before[0], after[1] - before[1]) == (talk.accepted, talk.accepted + wrong) and wrong > 1


def test_two_stages_draft_as_one(player):
    """The last stage has no embedding of the trunk; drafts and tokens are the same."""
    def play(player):
        talk = Talk(PROMPT[:12], pages_of(0), count=5, limits=MTP)
        player.play([talk])
        return talk.generated, talk.drafts

    with players(devices=("0", "0" if ENGINE_DEVICE == "cuda" else "1"), layer_split=(2,)) as split:
        assert len(split.engine.stages) == 2
        assert play(split) == play(player)


def test_of_several_heads_the_first_drafts(player, tmp_path, caplog):
    """As if there were no other, and the log says so."""
    def drafts(player):
        talk = Talk(PROMPT[:12], pages_of(0), count=99, limits=MTP)
        player.read(0, talk)
        return talk.drafts

    with players(rewritten("glm4moe-iq3s", tmp_path / "two.gguf", two_random_heads)) as two:
        assert [message for message in caplog.messages if "heads" in message] == [
            f"{tmp_path / 'two.gguf'}: of 2 heads the first drafts, on a device"
        ]
        found = drafts(two)
    assert len(found) == 3 and found == drafts(player)


def test_a_broken_row_loses_its_state_and_nobody_elses(player):
    """A slot whose result is an error is forgotten; the next request in it drafts as if alone."""
    talk = Talk(PROMPT, pages_of(0), count=99, limits=MTP)
    player.read(0, talk)
    segment = Segment("x", 0, 5, (7,), pages_of(0), Sampling(temperature=0))
    player.mtp.observe(Window(1, "decode", 0, (segment,)), (SegmentResult(error="broken"),))
    assert 0 not in player.mtp._kept and player.mtp.propose([]) == []
