"""Which drafts a head gives, and how many are accepted: exactly those of a loop that computes everything anew for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from strata.config import Settings
from strata.engine.draft_trust import Trust
from strata.engine.families import read_config
from strata.engine.forward import StageModel
from strata.engine.kv import PagedKV
from strata.engine.mtp_file import find_heads
from strata.engine.mtp_numpy import NumpyMtp
from strata.engine.numpy_ops import NumpyOps
from strata.messages import DraftLimits, Segment, Tokens, Window
from strata.weights.gguf import GGUFFile
from strata.weights.writer import StoredTensor
from tests.engine.drafting import HEAD, TINY, Player, Talk, engine_of, exact, floats, pages_of, rewritten

MTP = (DraftLimits(mtp=3),)
SOME, ALL, RANDOM = "glm4moe-accept-some-iq3s", "glm4moe-accept-all-iq3s", "glm4moe-iq3s"


class Slow:
    """Trunk and heads without memory: every call reads a whole text into fresh caches."""

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile.open(path)
        self.config, self.ops = read_config(self.file), NumpyOps(2)
        heads = find_heads(Settings(spec=2), self.file, self.config)
        assert heads is not None
        self.trunk = StageModel(self.file, self.config, range(self.config.num_layers), self.ops, self._kv(len(heads.config.mtp_blocks)))
        self.trunk.keeps_hidden = True
        self.heads = [NumpyMtp(heads, number, self.trunk, self.file) for number in range(len(heads.config.mtp_blocks))]

    def close(self) -> None:
        self.ops.close()
        self.file.close()

    def _kv(self, heads: int) -> PagedKV:
        return PagedKV(self.config, self.config.num_layers + heads, 8)

    def _window(self, tokens: Sequence[int]) -> Window:
        self.trunk.kv = self._kv(len(self.heads))
        self.ops._copies = None
        return Window(0, "decode", 0, (Segment("r", 0, 0, tuple(tokens), tuple(range(8))),))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            self.trunk.forward(self._window(tokens), None)
            logits = self.ops.logits(self.trunk.last_hidden[-1:], self.trunk.output)
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt):]

    def drafts(self, tokens: Sequence[int], count: int) -> Tokens:
        """What the heads guess behind ``tokens``: step i by head i, later ones by the last."""
        self.trunk.forward(self._window(tokens[:-1]), None)
        hidden = list(np.concatenate([np.zeros((1, self.config.width), np.float32), self.trunk.last_hidden]))
        text = list(tokens)
        for step in range(count):
            head = self.heads[min(step, len(self.heads) - 1)]
            out, logits = head.run(self._window(text), np.stack(hidden), (len(text) - 1,))
            text.append(int(logits.argmax()))
            hidden.append(out[0])
        return tuple(text[len(tokens):])

    def counts(self, prompt: Sequence[int], greedy: Sequence[int], most: int) -> tuple[int, int, int]:
        """(windows, drafted, accepted) of decoding ``greedy`` behind ``prompt`` with up to ``most`` drafts each."""
        windows = drafted = accepted = 0
        known = 1
        while known < len(greedy):
            count = min(most, len(greedy) - known - 1)
            drafts = self.drafts([*prompt, *greedy[:known]], count)
            right = next((at for at, draft in enumerate(drafts) if draft != greedy[known + at]), count)
            windows, drafted, accepted, known = windows + 1, drafted + count, accepted + right, known + right + 1
        return windows, drafted, accepted


def two_heads(metadata: dict[str, object], tensors: dict[str, StoredTensor]) -> None:
    """A second head, which differs from the first in how it joins its inputs."""
    exact(metadata, tensors)
    for name in [each for each in tensors if each.startswith(HEAD)]:
        tensors["blk.5." + name[len(HEAD):]] = tensors[name]
    noise = np.random.default_rng(0).standard_normal((256, 512)) * 0.02
    tensors["blk.5.nextn.eh_proj.weight"] = floats(np.eye(256, 512) + noise)
    metadata["glm4moe.block_count"], metadata["glm4moe.nextn_predict_layers"] = 6, 2


MODELS = {"some": (SOME, exact), "all": (ALL, exact), "two heads": (SOME, two_heads)}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Slow]]:
    name, change = MODELS[request.param]
    path = rewritten(name, tmp_path_factory.mktemp("models") / f"{name}.gguf", change)
    slow = Slow(path)
    yield request.param, path, slow
    slow.close()


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is made, however unsure."""
    monkeypatch.setattr(Trust, "is_worth", lambda self, chance, sort: True)
    monkeypatch.setattr(Trust, "goes_on", lambda self, chance: True)


def golden(name: str) -> tuple[Tokens, list[int]]:
    arrays = np.load(TINY / f"{MODELS[name][0]}.npz")
    return tuple(arrays["greedy_prompt"].tolist()), arrays["greedy"].tolist()


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"layer_split": (1, 3)}, {"kv": "int8"}], ids=str)
def test_counts_are_those_of_the_slow_loop(model: tuple[str, Path, Slow], settings: dict[str, object]) -> None:
    name, path, slow = model
    prompt, greedy = golden(name)
    with engine_of(path, spec=4, **settings) as engine:
        assert engine.facts.max_drafts == 3 and engine.facts.draft_sources == ("lookup", "mtp")
        talk, player = Talk(prompt, pages_of(1, 64), count=len(greedy), limits=MTP), Player(engine)
        player.play([talk])
        trust = engine._draft._sources[1].trust  # type: ignore[union-attr]
    assert talk.generated == greedy
    checks = [(window.segments[0].num_drafts, done.results[0].accepted) for window, done in zip(player.windows, player.done)]
    assert sum(trust._right) == talk.accepted
    assert sum(trust._tried) == sum(min(accepted + 1, drafts) for drafts, accepted in checks), "what lies behind a wrong one is not judged"
    if settings.get("kv") == "int8":  # the slow loop keeps what int8 rounds: now and then another draft
        assert abs(talk.accepted - slow.counts(prompt, greedy, 3)[2]) <= 2
        return
    assert (talk.windows, talk.drafted, talk.accepted) == slow.counts(prompt, greedy, 3)
    if name == "all":
        assert talk.accepted == talk.drafted and talk.windows == 12, "47 tokens behind the first, 4 a window"
    else:
        assert 0 < talk.accepted < talk.drafted


def test_drafts_are_those_of_the_slow_loop_wherever_they_begin(model: tuple[str, Path, Slow]) -> None:
    """Behind prompts of one token, across the end of a page and of a block of 128, by chunks, with drafts wanted now and then."""
    name, path, slow = model
    rng = np.random.default_rng(1)
    with engine_of(path, spec=4) as engine:
        player = Player(engine)
        for slot, (length, count, limits) in enumerate([
            (1, 4, (DraftLimits(3),)), (62, 6, (DraftLimits(2),)), (127, 5, (DraftLimits(), DraftLimits(3))),
            (200, 6, (DraftLimits(), DraftLimits(), DraftLimits(2), DraftLimits(1))),
        ]):  # fmt: skip
            talk = Talk(tuple(rng.integers(3, 500, length).tolist()), pages_of(slot, length), count=count, limits=limits)
            player.read(slot, talk)
            given = 0
            while talk.left > 0:
                assert talk.drafts == slow.drafts([*talk.prompt, *talk.generated], len(talk.drafts))
                given += len(talk.drafts)
                player.step({slot: talk})
            assert given >= 2


def two_random_heads(metadata: dict[str, object], tensors: dict[str, StoredTensor]) -> None:
    """The second joins its inputs in a way of its own."""
    for name in [each for each in tensors if each.startswith(HEAD)]:
        tensors["blk.5." + name[len(HEAD):]] = tensors[name]
    tensors["blk.5.nextn.eh_proj.weight"] = floats(np.random.default_rng(0).standard_normal((256, 512)) / 16)
    metadata["glm4moe.block_count"], metadata["glm4moe.nextn_predict_layers"] = 6, 2


@pytest.mark.parametrize("change", [lambda metadata, tensors: None, two_random_heads], ids=["one head", "two heads"])
def test_a_head_gets_the_hidden_states_of_the_tokens_that_are_kept(change, tmp_path: Path) -> None:
    """Heads of random weights, whose guesses depend on every hidden state, behind windows of which nothing, a part or all is accepted."""
    path = rewritten(RANDOM, tmp_path / "model.gguf", change)
    slow, prompt, seen = Slow(path), tuple(np.random.default_rng(2).integers(3, 500, 58).tolist()), []
    greedy = slow.greedy(prompt, 20)

    def partly_right(at: int, drafts: Tokens) -> Tokens:
        seen.append((at, drafts))
        right = len(seen) % 4
        return (*greedy[at:at + right], *((token + 1) % 512 for token in greedy[at + right:at + 3]))

    with engine_of(path, spec=4) as engine:
        talk = Talk(prompt, pages_of(0, 80), count=16, limits=MTP, spoil=partly_right)
        Player(engine).play([talk])
    assert talk.generated == greedy[:len(talk.generated)] and talk.accepted >= 6
    for at, drafts in seen:
        assert drafts == slow.drafts([*prompt, *greedy[:at]], len(drafts)), at
    assert sum(len(drafts) == 3 for _, drafts in seen) >= 4
    slow.close()
