"""Sizes from settings, model and free memory: what fits, what shrinks, what is refused with which words."""

from __future__ import annotations

import queue
import tracemalloc
from pathlib import Path

import pytest

from strata.config import Settings
from strata.engine import sizes
from strata.engine.families import ModelConfig, read_config
from strata.engine.load import load_engine
from strata.errors import SettingError
from strata.messages import EngineEvent, EngineFacts, Segment, Window, WindowDone
from strata.request import Sampling
from strata.weights.gguf import GGUFFile
from tests.engine.running import TINY

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
GIB = 1 << 30
# 2 layers, keys and values, 2 heads of 16 numbers, 64 positions, 4 bytes each; with int8 1 byte each and a 2-byte scale per head.
PAGE = 2 * 2 * 2 * 16 * 64 * 4
PAGE_INT8 = 2 * 2 * 2 * (16 + 2) * 64


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    with GGUFFile.open(GOLDEN / "qwen2.gguf") as file:
        return read_config(file)


def planned(config: ModelConfig, free: int | None, **settings) -> EngineFacts:
    return sizes.plan(Settings(**settings), config, free, 1)


def test_every_slot_has_room_for_a_full_context(config: ModelConfig) -> None:
    facts = planned(config, 8 * GIB, batch=5, spec=1)
    assert facts == EngineFacts(num_pages=5 * 2, page_tokens=64, context=128, page_bytes=PAGE, prompt_grid=128, chunk=512, max_rows=5)
    assert planned(config, None, batch=5, spec=1) == facts, "a system that does not tell its memory"
    assert planned(config, 8 * GIB, kv="int8").page_bytes == PAGE_INT8
    assert planned(config, 8 * GIB, context=65).num_pages == 8 * 2, "a page begun counts"


def test_halves_are_refused_by_name(config: ModelConfig) -> None:
    with pytest.raises(SettingError, match="kv: f16 .* the CPU keeps f32 or int8"):
        planned(config, GIB, kv="f16")


@pytest.mark.parametrize("chunk, rounded", [(1, 128), (128, 128), (129, 256), (512, 512)])
def test_chunks_end_on_the_grid(config: ModelConfig, chunk: int, rounded: int) -> None:
    assert planned(config, GIB, chunk=chunk).chunk == rounded


def test_the_pool_takes_half_of_what_the_weights_leave_and_the_context_shrinks(config: ModelConfig) -> None:
    weights = sizes.weight_bytes(config)
    facts = planned(config, weights + 2 * 7 * PAGE, batch=8)
    assert (facts.num_pages, facts.context) == (7, 128)
    facts = planned(config, weights + 2 * PAGE, batch=8)
    assert (facts.num_pages, facts.context) == (1, 64)


def test_memory_for_keys_and_values_as_set(config: ModelConfig) -> None:
    assert planned(config, GIB, kv_memory_mib=1).num_pages == (1 << 20) // PAGE
    assert planned(config, None, kv_memory_mib=4096).num_pages == (4096 << 20) // PAGE


@pytest.mark.parametrize("free, settings, words", [
    (1 << 20, {}, ["model", "0 MiB", "1 MiB are free"]),
    (GIB, {"kv_memory_mib": 2000}, ["kv_memory_mib: 2000 MiB", "1023 MiB are free"]),
    (GIB, {"kv_memory_mib": 1, "context": 4096}, ["context: 4096 tokens need 3 MiB", "1 MiB are planned", "--kv-memory-mib"]),
])
def test_what_does_not_fit_is_refused_with_the_numbers(config: ModelConfig, free: int, settings: dict, words: list[str]) -> None:
    if not settings:
        free = sizes.weight_bytes(config)
        words = ["model", f"{free >> 20} MiB are free", "smaller model"]
    with pytest.raises(SettingError) as refused:
        planned(config, free, **settings)
    assert all(word in refused.value.message for word in words), refused.value.message


@pytest.mark.parametrize("kv, advice", [("f32", True), ("int8", False)])
def test_nobody_is_told_to_do_what_is_done(config: ModelConfig, kv: str, advice: bool) -> None:
    with pytest.raises(SettingError) as refused:
        planned(config, GIB, kv=kv, kv_memory_mib=1, context=65536)
    assert ("--kv int8" in refused.value.message) is advice


def test_a_context_beyond_the_training_is_served_with_a_warning(config: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    assert planned(config, GIB, context=1000).context == 1000
    assert "beyond the 128" in caplog.text


def test_weights_are_counted_as_they_are_kept() -> None:
    """The untied model's embedding stays in the file; everything that is multiplied by is float32."""
    with GGUFFile.open(GOLDEN / "llama-linear.gguf") as file:
        config = read_config(file)
        matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) == 2 and tensor.name != "token_embd.weight"]
        assert sizes.weight_bytes(config) == sum(4 * tensor.shape[0] * tensor.shape[1] for tensor in matrices)


@pytest.mark.parametrize("chunk", [128, 256])
def test_the_work_space_of_the_plan_is_about_what_a_window_takes(chunk: int) -> None:
    """Measured by tracemalloc, which sees every array: the peak of two chunks, the last rows' logits among them."""
    with GGUFFile.open(TINY) as file:
        engine = load_engine(Settings(threads=2, chunk=chunk, context=512, batch=2), file)
        planned = engine.memory[0].work
        events: queue.Queue[EngineEvent] = queue.Queue()
        tracemalloc.start()
        try:
            engine.start(events.put)
            before = tracemalloc.get_traced_memory()[0]
            for number in range(2):
                tokens = tuple(range(3, 3 + chunk))
                engine.submit(Window(number, "prompt", 0, (Segment("r", 0, number * chunk, tokens, tuple(range(8)), Sampling()),)))
                assert isinstance(events.get(timeout=300), WindowDone)
            peak = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
            engine.close()
    assert 2 / 3 < planned / peak < 1.5, (planned, peak)
