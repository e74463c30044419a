"""Stages whose threads only enqueue: whom an error belongs to, what a window took, and that it is told when it has ended."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.config import Settings
from strata.devices.base import DeviceError, DeviceLost
from strata.devices.host_compiler import find_compiler
from strata.engine.load import load_engine
from strata.engine.pipeline import Pipeline
from strata.messages import (
    CopyDone, DraftLimits, EngineEvent, EngineFacts, EngineFailed, PageCopy, Segment, SegmentResult, Window, WindowDone,
)  # fmt: skip
from strata.request import Sampling
from strata.weights.gguf import GGUFFile
from tests.engine.running import MOE, TINY
from tests.engine.test_load import GREEDY, Client

FACTS = EngineFacts(num_pages=8, page_tokens=4, context=32)
WAIT = 300.0


class LazyModel:
    """A model on a device that works when it is asked for its time. ``broken``: what its device reports from then on."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.broken, self.ran = seconds, (), 0
        self.copies: Exception | None = None

    def forward(self, window: Window, data: int | None) -> int:
        return (data or 0) + 1

    def timer(self) -> Callable[[], float]:
        def ended() -> float:
            self.check()
            self.ran += 1
            return self.seconds

        return ended

    def check(self) -> None:
        if self.broken:
            raise self.broken[0]

    def copy_out(self, pages: tuple[int, ...]) -> object:
        if self.copies is not None:
            raise self.copies
        return pages

    def copy_in(self, image: object, pages: tuple[int, ...]) -> None: ...


def run(models: list[LazyModel], *jobs: Window | PageCopy) -> tuple[list[EngineEvent], Pipeline]:
    """One job after the other, to its end or the engine's."""
    clock = iter(range(0, 10_000, 10))
    pipeline = Pipeline(
        [(f"stage {number}", model) for number, model in enumerate(models)], FACTS,
        lambda window, data: (SegmentResult((int(data),)),), clock=lambda: float(next(clock)),
    )  # fmt: skip
    events: queue.Queue[EngineEvent] = queue.Queue()
    pipeline.start(events.put)
    told = []
    for job in jobs:
        (pipeline.submit if isinstance(job, Window) else pipeline.copy)(job)  # type: ignore[operator]
        told.append(events.get(timeout=WAIT))
    pipeline.close()
    assert events.empty()
    return told, pipeline


def window(number: int) -> Window:
    return Window(number, "decode", 0, (Segment("r", 0, number, (number,), (0,)),))


def test_the_times_of_a_window_are_its_devices() -> None:
    models = [LazyModel(3.0), LazyModel(5.0)]
    told, pipeline = run(models, window(0), window(1))
    assert [(event.stage_seconds, event.seconds) for event in told] == [((3.0, 5.0), 8.0)] * 2
    assert [event.results for event in told] == [(SegmentResult((2,)),)] * 2
    assert [times.busy for times in pipeline.times] == [6.0, 10.0] and all(times.wait > 0 for times in pipeline.times)
    assert [model.ran for model in models] == [2, 2]


@pytest.mark.parametrize("error, windows", [(DeviceError("too many"), (0,)), (DeviceLost("illegal address"), ())])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_stage_whose_device_broke_is_named_though_the_last_one_hears_of_it(stage: int, error: DeviceError, windows: tuple[int]) -> None:
    models = [LazyModel(1.0) for _ in range(3)]
    for model in models[stage:]:  # whoever waits for a broken device is broken too
        model.broken = (error,)
    told, _ = run(models, window(0))
    assert told == [EngineFailed(f"stage {stage}: {type(error).__name__}: {error}", windows)]


def test_an_error_of_the_host_is_the_stages_where_it_happened() -> None:
    models = [LazyModel(1.0), LazyModel(1.0)]
    models[1].forward = lambda window, data: 1 // 0  # type: ignore[assignment]
    told, _ = run(models, window(0), window(1))
    assert [event.window_ids for event in told] == [(0,), (1,)] and all("stage 1: ZeroDivisionError" in event.message for event in told)


def test_a_copy_that_loses_the_device_ends_the_engine_and_another_error_does_not() -> None:
    models = [LazyModel(1.0), LazyModel(1.0)]
    models[1].copies = DeviceError("busy")
    told, _ = run(models, PageCopy(1, "out", 9, (3,)))
    assert told == [CopyDone(1, "stage 1: DeviceError: busy")]
    models[1].copies = DeviceLost("gone")
    told, _ = run(models, PageCopy(1, "out", 9, (3,)))
    assert told == [EngineFailed("stage 1: DeviceLost: gone", ())]


# ---------------------------------------------------------------- the emulated device


@pytest.fixture
def client():
    if find_compiler() is None:
        pytest.skip("no C++ compiler (g++ or clang++) found")
    settings = Settings(device="emulated", layer_split=(2,), batch=2, context=256, chunk=64)
    with GGUFFile.open(TINY) as file:
        engine = load_engine(settings, file)
        yield Client(engine, pages_each=4)
        engine.close()


def ask(client: Client, job: Window) -> EngineEvent:
    client.engine.submit(job)
    return client.events.get(timeout=WAIT)


@pytest.mark.cxx
def test_a_chunk_that_needs_no_token_is_told_when_it_has_run(client: Client) -> None:
    """Its time is what the others are owed a share of; on a device that only enqueues it would be next to nothing."""
    chunk = Segment("r", 0, 0, tuple(range(3, 67)), (0, 1), None)
    done = ask(client, Window(1, "prompt", 0, (chunk,)))
    assert isinstance(done, WindowDone) and done.results == (SegmentResult(),)
    streams = [stage.model.ops.stream for stage in client.engine.stages]
    assert all(stream.num_done == stream._num_taken and not stream._queue for stream in streams)
    assert len(done.stage_seconds) == 2 and min(done.stage_seconds) > 0 and done.seconds == sum(done.stage_seconds)
    assert [times.busy for times in client.engine.times] == pytest.approx(list(done.stage_seconds))


@pytest.mark.cxx
def test_a_kernel_that_fails_on_the_first_stage_ends_the_engine_by_its_name(client: Client) -> None:
    def fail() -> None:
        raise DeviceLost("attention.cu: deadlock")

    assert isinstance(ask(client, Window(1, "prompt", 0, (client.segment(0, 0, [5, 6, 7], GREEDY),))), WindowDone)
    client.engine.stages[0].model.ops.stream.enqueue(fail)
    told = ask(client, Window(2, "decode", 0, (client.segment(0, 3, [9], Sampling(temperature=0.0)),)))
    assert told == EngineFailed("stage 0 (emulated, layers 0 to 1): DeviceLost: attention.cu: deadlock", ())
    for thread in client.engine._threads:
        thread.join(WAIT)
        assert not thread.is_alive()


SAMPLINGS = [
    GREEDY, Sampling(seed=1, temperature=0.9, top_p=0.9, top_k=5, min_p=0.01), Sampling(temperature=0.0, logprobs=0),
    Sampling(seed=2, repetition_penalty=1.2, presence_penalty=0.1, logprobs=3),
]  # fmt: skip


@pytest.mark.cxx
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (g++ or clang++) found")
@pytest.mark.parametrize("path, settings", [
    (TINY, {"kv": "f16", "layer_split": (2,)}), (MOE[0], {}), (MOE[1], {"spec": 3}),
], ids=["dense", "experts", "drafts"])  # fmt: skip
def test_no_request_waits_for_a_compiler(path: Path, settings: dict[str, Any]) -> None:
    """Prompts of sizes that chunks never have, every kind of sampling, logprobs, drafts: all kernels were there at the start."""
    with GGUFFile.open(path) as file:
        engine = load_engine(Settings(device="emulated", batch=4, context=256, chunk=64, **settings), file)
        devices = [stage.model.ops.device for stage in engine.stages]
        at_start = [set(device.compiled) for device in devices]
        client = Client(engine, pages_each=4)
        for slot, (sampling, size) in enumerate(zip(SAMPLINGS, (21, 37, 9, 64))):
            prompt = replace(client.segment(slot, 0, list(range(3, 3 + size)), sampling), history=((5, 6), [7]))
            client.run("prompt", replace(prompt, prompt_logprobs=1) if slot == 2 else prompt)
        limits = DraftLimits(mtp=engine.facts.max_drafts)
        for count in range(1, 5):
            rows = [client.segment(slot, 70, [9], SAMPLINGS[slot]) for slot in range(count)]
            client.run("decode", *(replace(row, history=((5,), [7]), draft_limits=limits) for row in rows))
        assert [device.compiled - before for device, before in zip(devices, at_start)] == [set()] * len(devices)
        engine.close()
