"""Memory for decoded experts: planned, printed, kept to, and without a trace in the tokens."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from strata.config import Settings
from strata.engine import sizes
from strata.engine.expert_sizes import SHARE, ExpertRoom, expert_bytes, expert_room
from strata.engine.families import ModelConfig, read_config
from strata.engine.load import describe_engine, load_engine
from strata.engine.stage_cost import costs, float_seconds
from strata.errors import SettingError
from strata.weights.gguf import GGUFFile
from tests.engine.running import MOE
from tests.engine.test_load import GREEDY, Client

QWEN3MOE, GLM4MOE = MOE[:2]
ONE = 4 * 3 * 256 * 256  # an expert of the fixtures
EVERY = 4 * 8 * ONE
MIB = 1 << 20


def config_of(path: Path) -> ModelConfig:
    with GGUFFile.open(path) as file:
        return read_config(file)


@contextmanager
def loaded(path: Path, **settings: Any):
    with GGUFFile.open(path) as file:
        engine = load_engine(Settings(**{"threads": 2, "batch": 4, "context": 256, "chunk": 256, **settings}), file)
        try:
            yield engine
        finally:
            engine.close()


@pytest.mark.parametrize(
    ("cache", "free", "held"),
    [
        (None, None, EVERY),
        (None, int(EVERY / SHARE) + 2, EVERY),
        (None, EVERY, int(EVERY * SHARE)),
        (2, None, 2 * MIB),
        (2, 3 * MIB, 2 * MIB),
        (4096, None, EVERY),
    ],
)
def test_room_for_experts(cache: int | None, free: int | None, held: int) -> None:
    room = expert_room(Settings(expert_cache_mib=cache), config_of(QWEN3MOE), range(4), free)
    assert room == ExpertRoom(EVERY, held)
    assert room.limit == (None if held == EVERY else held)


@pytest.mark.parametrize(("cache", "free"), [(1, None), (1, 64 * MIB), (4, 3 * MIB), (None, 2 * ONE), (None, -5)])
def test_room_for_less_than_a_row_or_more_than_there_is_is_refused(cache: int | None, free: int | None) -> None:
    with pytest.raises(SettingError, match="^expert_cache_mib: .* need 2, all of them 25"):
        expert_room(Settings(expert_cache_mib=cache), config_of(QWEN3MOE), range(4), free)


def test_stages_share_the_room_by_their_blocks_with_experts() -> None:
    config = config_of(GLM4MOE)
    room = expert_room(Settings(expert_cache_mib=6), config, range(4), None)
    first, second = (room.share(expert_bytes(config, blocks)) for blocks in (range(0, 2), range(2, 4)))
    assert (first, second) == (ExpertRoom(8 * ONE, 2 * MIB), ExpertRoom(16 * ONE, 4 * MIB))
    assert room.share(0) == ExpertRoom(0, 0)
    assert expert_room(Settings(expert_cache_mib=1), config, range(1), 0) == ExpertRoom(0, 0), "a dense block needs no room"


def test_keys_and_values_get_what_experts_leave() -> None:
    config = config_of(QWEN3MOE)
    free = sizes.weight_bytes(config) + 8 * MIB
    facts = sizes.plan(Settings(), config, free, 1)
    assert facts.num_pages == int((8 * MIB - int(8 * MIB * SHARE)) * sizes.POOL_SHARE) // facts.page_bytes
    facts = sizes.plan(Settings(expert_cache_mib=2), config, free, 1)
    assert facts.num_pages == 6 * MIB // 2 // facts.page_bytes


@pytest.mark.parametrize("path", [QWEN3MOE, GLM4MOE], ids=lambda path: path.stem)
def test_the_plan_is_what_the_stages_keep(path: Path) -> None:
    with loaded(path, layer_split=(2,), spec=1) as engine:
        config = engine.stages[0].model.config
        for stage, memory, span in zip(engine.stages, engine.memory, (range(0, 2), range(2, 4)), strict=True):
            layers, store = stage.model.layers, stage.model.ops.mixture.store
            kept = [matrix for layer in layers for matrix in (layer.qkv, layer.attn_output)]
            kept += [matrix for layer in layers if layer.dense for matrix in (layer.dense.gate_up, layer.dense.down)]
            kept += [layer.routed.router for layer in layers if layer.routed]
            kept += [stage.model.output] if stage.model.is_last else []
            assert sum(matrix.weights.nbytes for matrix in kept) == sizes.weight_bytes(config, span)
            assert store.decoded * ONE == expert_bytes(config, span)
            assert memory.weights == sizes.weight_bytes(config, span) + expert_bytes(config, span)


def test_the_plan_tells_of_experts_that_do_not_fit() -> None:
    with GGUFFile.open(GLM4MOE) as file:
        whole = describe_engine(Settings(spec=1), file)
        limited = describe_engine(Settings(expert_cache_mib=6, layer_split=(2,), spec=1), file)
    assert not any("decoded when used" in line for line in whole)
    assert "2 of 6 MB of experts, decoded when used" in limited[0] and "4 of 13 MB of experts" in limited[1]


def test_neither_room_nor_stages_change_a_token() -> None:
    prompts = [list(range(3, 60)), [50, 60, 70], list(range(100, 240)), [9]]
    answers = []
    for settings in ({}, {"expert_cache_mib": 4}, {"expert_cache_mib": 8, "layer_split": (1, 3)}, {"devices": ("cpu", "cpu")}):
        with loaded(GLM4MOE, **settings) as engine:
            answers.append(Client(engine, pages_each=4).answers(prompts, [GREEDY] * 4, 10))
    assert answers[1:] == answers[:1] * 3


def test_stages_hold_no_more_than_their_room() -> None:
    """Whatever windows they have run."""
    with loaded(GLM4MOE, expert_cache_mib=6, layer_split=(2,), spec=1) as engine:
        stores = [stage.model.ops.mixture.store for stage in engine.stages]
        assert [store.limit for store in stores] == [2 * MIB, 4 * MIB]
        Client(engine, pages_each=4).answers([list(range(3, 60)), [50, 60, 70]], [GREEDY] * 2, 6)
        for store in stores:
            held = sum(expert.gate_up.nbytes + expert.down.nbytes for expert in store._held.values())
            assert held == store.limit // ONE * ONE and store.decoded * ONE > held


def test_a_split_counts_what_a_row_reads() -> None:
    """Two of eight experts; and the draft block goes with the last stage."""
    with GGUFFile.open(GLM4MOE) as file:
        config = read_config(file)
        plain, drafting, usual, most = (costs(Settings(spec=spec), file, config, float_seconds(config, 1)) for spec in (1, 3, 4, 16))
    attention = 4 * (2 * 256 * 256 + 2 * 128 * 256 + 256 + 128 + 128 + 256 + 64 + 64 + 256)
    assert plain.layers[0] == attention + 4 * 3 * 512 * 256
    assert plain.layers[1:] == (attention + 4 * (3 * 256 * 256 + 8 * 256 + 8) + 2 * ONE,) * 3
    assert plain.last == 4 * 512 * 256 and drafting.layers == plain.layers
    assert most == usual, "a head seldom takes more than three steps"
    assert drafting.last == plain.last + 2 * (plain.layers[1] + 4 * (2 * 256 * 256 + 3 * 256) + plain.last)
