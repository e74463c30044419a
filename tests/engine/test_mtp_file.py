"""Where heads are found, and what is said of files that are none."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from strata.config import Settings
from strata.engine.draft_load import draft_facts
from strata.engine.families import read_config
from strata.engine.mtp_file import Heads, draft_tokens, find_heads, spec_tokens
from strata.errors import ModelError
from strata.messages import DraftLimits, EngineFacts
from strata.weights.gguf import GGUFFile
from strata.weights.writer import StoredTensor
from tests.engine.drafting import HEAD, TINY, Player, Talk, engine_of, exact, floats, is_head, pages_of, rewritten

MODEL = "glm4moe-accept-some-iq3s"
Tensors = dict[str, StoredTensor]


def without_head(metadata: dict[str, object], tensors: Tensors) -> None:
    exact(metadata, tensors)
    for name in filter(is_head, list(tensors)):
        del tensors[name]


def head_alone(metadata: dict[str, object], tensors: Tensors) -> None:
    exact(metadata, tensors)
    for name in list(tensors):
        if not is_head(name):
            del tensors[name]
    for key in list(metadata):
        if key.startswith("tokenizer."):
            del metadata[key]


def head_file(tmp_path: Path, change=lambda metadata, tensors: None, name: str = MODEL) -> Path:
    def both(metadata: dict[str, object], tensors: Tensors) -> None:
        head_alone(metadata, tensors)
        change(metadata, tensors)

    return rewritten(name, tmp_path / "head.gguf", both)


def heads_of(model: Path, **settings) -> Heads | None:
    """As found, their file closed again."""
    with GGUFFile.open(model) as file:
        heads = find_heads(Settings(**{"spec": 4, **settings}), file, read_config(file))
        if heads is not None:
            heads.close()
        return heads


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewritten(MODEL, tmp_path_factory.mktemp("models") / "trunk.gguf", without_head)


def test_one_file_or_two_draft_the_same(trunk: Path, tmp_path: Path) -> None:
    prompt = tuple(np.load(TINY / f"{MODEL}.npz")["greedy_prompt"].tolist())
    found = []
    for path, settings in ((rewritten(MODEL, tmp_path / "whole.gguf", exact), {}), (trunk, {"mtp": head_file(tmp_path)})):
        with engine_of(path, spec=4, **settings) as engine:
            assert engine.facts.draft_sources == ("lookup", "mtp")
            talk = Talk(prompt, pages_of(0, 64), limits=(DraftLimits(3),))
            Player(engine).play([talk])
            found.append((talk.generated, talk.windows, talk.drafted, talk.accepted))
    assert found[0] == found[1] and found[0][-1] > 0


def test_a_promise_without_a_head_is_served_without_it(trunk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), engine_of(trunk, spec=4) as engine:
        assert engine.facts.draft_sources == ("lookup",)
        talk = Talk((5, 6, 7, 5, 6, 7), pages_of(0, 64))
        Player(engine).play([talk])
        assert len(talk.generated) >= talk.count
    assert caplog.text.count("trunk.gguf: promises a head") == 1
    assert "drafts: up to 3 behind each token, from the slot's own text\n" in caplog.text


def test_nothing_is_opened_without_drafts(trunk: Path) -> None:
    assert heads_of(trunk, spec=1, mtp=Path("no such file")) is None
    assert heads_of(TINY / f"{MODEL}.gguf", spec=1) is None


def rename(old: str, new: str):
    def change(metadata: dict[str, object], tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return change


def moved(tensors: Tensors, number: object, keep: bool = False) -> None:
    """The head as another block, or in that place too."""
    for name in filter(is_head, list(tensors)):
        tensors[f"blk.{number}.{name[len(HEAD):]}"] = tensors[name]
        if not keep:
            del tensors[name]


@pytest.mark.parametrize("change, parts", [
    (lambda metadata, _: metadata.update({"general.architecture": "llama"}), ("general.architecture is 'llama'", "'glm4moe'")),
    (lambda metadata, _: metadata.update({"glm4moe.embedding_length": 512}), ("glm4moe.embedding_length is 512", "256", "--mtp")),
    (lambda metadata, _: metadata.update({"glm4moe.rope.freq_base": 5e5}), ("glm4moe.rope.freq_base is 500000.0",)),
    (lambda _, tensors: tensors.pop(HEAD + "nextn.eh_proj.weight"), ("no tensor blk.N.nextn.eh_proj.weight", "--mtp")),
    (lambda _, tensors: tensors.pop(HEAD + "nextn.hnorm.weight"), ("blk.4.nextn.hnorm.weight is missing",)),
    (lambda _, tensors: tensors.pop(HEAD + "attn_q.weight"), ("blk.4.attn_q.weight is missing (1 in all)",)),
    (lambda _, tensors: tensors.update({HEAD + "nextn.eh_proj.weight": floats(np.zeros((256, 256)))}), ("(256, 256)", "(256, 512)")),
    (lambda _, tensors: tensors.update({HEAD + "nextn.embed_tokens.weight": floats(np.zeros((9, 256)))}), ("(9, 256)", "(512, 256)")),
    (lambda metadata, _: metadata.update({"strata.draft_vocab": np.array([1, 512], np.int32)}), ("strata.draft_vocab", "512")),
    (lambda metadata, _: metadata.update({"strata.draft_vocab": np.array([1, 1], np.int32)}), ("twice",)),
    (lambda metadata, _: metadata.update({"strata.draft_vocab": "1, 2"}), ("no list of token ids",)),
    (lambda metadata, _: metadata.update({"glm4moe.attention.head_count": np.array([4, 4])}), ("head_count is not one number",)),
    (lambda metadata, _: metadata.update({"glm4moe.attention.layer_norm_rms_epsilon": 0.25}), ("epsilon is 0.25", "--mtp")),
    (lambda metadata, _: metadata.update({"glm4moe.expert_used_count": 1}), ("expert_used_count is 1, and the model's is 2",)),
    (lambda _, tensors: moved(tensors, 3), ("blk.3.nextn.eh_proj.weight", "heads are blocks 3; the model's 4 layers", "--mtp")),
    (lambda _, tensors: moved(tensors, 29), ("heads are blocks 29; the model's 4 layers",)),
    (lambda _, tensors: moved(tensors, 6, keep=True), ("heads are blocks 4, 6; the model's 4 layers",)),
    (lambda _, tensors: moved(tensors, "\N{SUPERSCRIPT TWO}"), ("no tensor blk.N.nextn.eh_proj.weight",)),
    (lambda _, tensors: tensors.update({HEAD + "attn_sinks.weight": floats(np.ones(256))}), ("'blk.4.attn_sinks.weight' is none of",)),
])  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(trunk: Path, tmp_path: Path, change, parts: tuple[str, ...]) -> None:
    path = head_file(tmp_path, change)
    with pytest.raises(ModelError) as error:
        heads_of(trunk, mtp=path)
    assert str(error.value).startswith(f"{path}: ")
    for part in parts:
        assert part in str(error.value)


def test_the_model_itself_is_no_head_for_another(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="architecture is 'llama'"):
        heads_of(TINY / f"{MODEL}.gguf", mtp=TINY / "llama-iq3s.gguf")


@pytest.mark.parametrize("most, ids", [(3, [77, 4, 30]), (100, [77, 4, 30, 31, 9]), (0, None)])
def test_the_first_of_the_tokens_worth_drafting(trunk: Path, tmp_path: Path, most: int, ids: list[int] | None) -> None:
    path = head_file(tmp_path, lambda metadata, _: metadata.update({"strata.draft_vocab": np.array([77, 4, 30, 31, 9], np.int32)}))
    heads = heads_of(trunk, mtp=path, draft_vocab=most)
    assert heads is not None
    assert (None if heads.vocabulary is None else heads.vocabulary.tolist()) == ids
    assert (None if heads.ascending is None else heads.ascending.tolist()) == (ids and sorted(ids))


def test_without_room_for_what_texts_say_devices_draft_more_frequent_tokens() -> None:
    assert draft_tokens(Settings(device="cpu")) == 2048 < draft_tokens(Settings(device="emulated")) == 8192
    assert draft_tokens(Settings(device="cuda", draft_vocab=0)) == 0


def test_a_part_of_the_vocabulary_is_all_that_is_drafted(trunk: Path, tmp_path: Path) -> None:
    """With what the text has said; where the model picks one of those, it is drafted as by a head that knows them all."""
    arrays = np.load(TINY / f"{MODEL}.npz")
    prompt, greedy = tuple(arrays["greedy_prompt"].tolist()), arrays["greedy"].tolist()
    known = sorted(set(greedy[:24]))
    path = head_file(tmp_path, lambda metadata, _: metadata.update({"strata.draft_vocab": np.array(known, np.int32)}))
    counts = []
    for settings in ({"draft_vocab": 512}, {"draft_vocab": 0}):
        with engine_of(trunk, spec=2, mtp=path, **settings) as engine:
            seen: list[int] = []
            talk = Talk(prompt, pages_of(0, 64), limits=(DraftLimits(1),), spoil=lambda at, drafts: (seen.extend(drafts), drafts)[1])
            Player(engine).play([talk])
            counts.append(talk.accepted)
            assert settings["draft_vocab"] == 0 or set(seen) <= {*known, *prompt, *talk.generated}
    assert counts[0] >= counts[1] > 0


def test_the_plan_counts_what_a_head_takes(trunk: Path, tmp_path: Path) -> None:
    path = head_file(tmp_path, lambda metadata, _: metadata.update({"strata.draft_vocab": np.arange(100, dtype=np.int32)}))
    page = {}
    for name, settings in {"off": {}, "on": {"spec": 2, "mtp": path}}.items():
        with engine_of(trunk, **settings) as engine:
            page[name] = engine.facts.page_bytes, engine.memory[-1]
    layer = 2 * 2 * 64 * 64 * 4  # keys and values, heads, positions, dimensions, float32
    assert page["on"][0] - page["off"][0] == layer + 4 * 256
    with GGUFFile.open(path) as file:
        parameters = sum(int(np.prod(tensor.shape)) for tensor in file.tensors.values())
    assert page["on"][1].weights - page["off"][1].weights == 4 * (parameters + 100 * 256)


@pytest.mark.parametrize("given, spec, rows", [
    ({}, 16, 64),  # four slots
    ({"batch": 8}, 16, 128),
    ({"batch": 12}, 16, 128),
    ({"batch": 64}, 16, 256),
    ({"batch": 64, "spec": 8}, 8, 512),
    ({"device": "cuda"}, 1, 4),
    ({"device": "cuda", "mtp": Path("head.gguf")}, 4, 16),
    ({"device": "cuda", "mtp": Path("head.gguf"), "spec": 2}, 2, 8),
])  # fmt: skip
def test_how_many_tokens_a_pass_may_check(trunk: Path, given: dict[str, object], spec: int, rows: int) -> None:
    """On the processors a window goes to 128 rows, or three drafts for each slot, unless somebody said how many."""
    settings = Settings(**{"batch": 4, "spec": 0, **given})
    with GGUFFile.open(trunk) as file:
        config = read_config(file)
    facts = draft_facts(settings, config, EngineFacts(num_pages=8, page_tokens=64, context=512, max_rows=settings.batch), None)
    assert (spec_tokens(settings, config), facts.max_rows, facts.max_drafts) == (spec, rows, spec - 1)
