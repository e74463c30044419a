"""The head on the CPU: numbers of llama.cpp over whole texts, in pieces, by rows and by blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from strata.config import Settings
from strata.engine.families import read_config
from strata.engine.forward import StageModel
from strata.engine.kv import KVKind, PagedKV
from strata.engine.mtp_file import find_heads
from strata.engine.mtp_numpy import NumpyMtp
from strata.engine.numpy_ops import NumpyOps
from strata.messages import Segment, Window
from strata.request import Sampling
from strata.weights.gguf import GGUFFile
from tests.engine.drafting import HEAD, TINY, Change, floats, rewritten

NAMES = ("glm4moe-iq3s", "glm4moe-accept-all-iq3s", "glm4moe-accept-some-iq3s")
PAGES = (2, 0, 3)


@contextmanager
def models(path: Path, kind: KVKind = "f32", deterministic: bool = False) -> Iterator[tuple[StageModel, NumpyMtp]]:
    """A whole model as one stage, and its head behind it."""
    with GGUFFile.open(path) as file:
        config, ops = read_config(file), NumpyOps(2, deterministic)
        trunk = StageModel(file, config, range(config.num_layers), ops, PagedKV(config, config.num_layers + 1, 4, kind=kind))
        trunk.keeps_hidden = True
        heads = find_heads(Settings(spec=2), file, config)
        assert heads is not None
        try:
            yield trunk, NumpyMtp(heads, 0, trunk, file)
        finally:
            ops.close()


def window(kind: str, start: int, tokens: np.ndarray) -> Window:
    return Window(0, kind, 0, (Segment("r", 0, start, tuple(tokens.tolist()), PAGES, Sampling(), prompt_logprobs=0),))


def before(hidden: np.ndarray) -> np.ndarray:
    """The hidden state before each row."""
    return np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])


@pytest.mark.parametrize("kind, deterministic", [("prompt", False), ("prompt", True), ("decode", False)])
@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_those_of_llama_cpp(name: str, kind: str, deterministic: bool) -> None:
    golden = np.load(TINY / f"{name}.npz")
    with models(TINY / f"{name}.gguf", deterministic=deterministic) as (trunk, head):
        whole = window(kind, 0, golden["ids"])
        trunk.forward(whole, None)
        assert np.abs(trunk.last_hidden - golden["trunk_hidden"]).max() < 1e-3
        hidden, logits = head.run(whole, before(trunk.last_hidden), range(40))
    assert np.abs(hidden - golden["mtp_hidden"]).max() < 1e-3
    assert np.abs(logits - golden["mtp_logits"]).max() < 1e-3


@pytest.mark.parametrize("kind", ["f32", "int8"])
def test_in_pieces_of_any_size_with_cells_written_twice(kind: KVKind) -> None:
    """Cells are kept between windows; what a guess left in one is overwritten; only wanted rows come out."""
    golden = np.load(TINY / f"{NAMES[0]}.npz")
    inputs = before(golden["trunk_hidden"])
    near = 1e-3 if kind == "f32" else 0.15
    with models(TINY / f"{NAMES[0]}.gguf", kind) as (_, head):
        for start, stop in ((0, 1), (1, 9), (9, 10), (10, 33), (33, 40)):
            head.run(window("decode", start, golden["ids"][start:stop][::-1]), inputs[start:stop][::-1], ())
            hidden, logits = head.run(window("decode", start, golden["ids"][start:stop]), inputs[start:stop], (stop - 1 - start,))
            assert hidden.shape == (1, 256) and logits.shape == (1, 512)
            assert np.abs(logits[0] - golden["mtp_logits"][stop - 1]).max() < near
            assert np.abs(hidden[0] - golden["mtp_hidden"][stop - 1]).max() < near


def test_the_trunk_does_not_notice() -> None:
    golden = np.load(TINY / f"{NAMES[0]}.npz")
    with models(TINY / f"{NAMES[0]}.gguf") as (trunk, head):
        first = trunk.forward(window("decode", 0, golden["ids"][:20]), None)
        before_head = trunk.kv.data[:4].copy()
        head.run(window("decode", 0, golden["ids"][:24]), np.zeros((24, 256), np.float32), ())
        assert np.array_equal(trunk.kv.data[:4], before_head, equal_nan=True)
        second = trunk.forward(window("decode", 20, golden["ids"][20:]), None)
    assert np.abs(np.concatenate([first, second]) - golden["logits"]).max() < 1e-3


def test_what_an_earlier_owner_left_in_a_page_does_not_reach_a_guess() -> None:
    """A guess may be the first to write a page, before the trunk has cleared it."""
    golden = np.load(TINY / f"{NAMES[0]}.npz")
    with models(TINY / f"{NAMES[0]}.gguf") as (trunk, head):
        trunk.kv.data.fill(np.nan)
        _, logits = head.run(window("decode", 0, golden["ids"]), before(golden["trunk_hidden"]), range(40))
    assert np.abs(logits - golden["mtp_logits"]).max() < 1e-3


@pytest.mark.parametrize(
    "missing, trunk", [("shared_head_norm", "output_norm"), ("shared_head_head", "output"), ("embed_tokens", "token_embd")]
)
def test_what_the_head_lacks_is_the_trunks(missing: str, trunk: str, tmp_path: Path) -> None:
    """Without its own tensor it computes what it would with a copy of the trunk's, and not what it would with another."""
    name = f"{HEAD}nextn.{missing}.weight"
    golden = np.load(TINY / f"{NAMES[0]}.npz")
    changes: tuple[Change, ...] = (
        lambda _, tensors: tensors.pop(name),
        lambda _, tensors: tensors.update({name: tensors[f"{trunk}.weight"]}),
        lambda _, tensors: tensors.update({name: floats(np.random.default_rng(0).standard_normal(tensors[name].shape))}),
    )
    found = []
    for change in changes:
        with models(rewritten(NAMES[0], tmp_path / f"{len(found)}.gguf", change)) as (_, head):
            found.append(head.run(window("decode", 0, golden["ids"]), before(golden["trunk_hidden"]), range(40))[1])
    assert np.array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).max() > 1
