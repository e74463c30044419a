"""Stages of a loaded engine: the same tokens however the layers are cut, one device's memory each, failures by name.

On the CPU with real threads, on the emulated device where there is a compiler.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.config import Settings
from strata.devices.base import DeviceInfo, KernelName
from strata.devices.emulated import EmulatedDevice
from strata.devices.host_compiler import find_compiler
from strata.engine import placement
from strata.engine.device_load import free_bytes, stage_name
from strata.engine.device_bytes import tensor_bytes
from strata.engine.device_plan import planner
from strata.engine.families import read_config
from strata.engine.load import describe_engine, load_engine
from strata.engine.placement import Parts, open_devices, split_over_devices
from strata.engine.sizes import weight_bytes
from strata.errors import SettingError, StartError
from strata.kernels.pages import PageShape
from strata.messages import EngineFailed, Segment, Window, WindowDone
from strata.request import Sampling
from strata.weights.gguf import GGUFFile
from tests.engine.running import GOLDEN, TINY
from tests.engine.test_load import GREEDY, Client

QWEN3 = next(path for path in GOLDEN if path.stem == "qwen3")  # a tied head, q and k norms, two layers
PROMPTS = [list(range(3, 30)), [50, 60, 70], list(range(100, 240)), [9]]
SAMPLINGS = [GREEDY, Sampling(seed=9, temperature=2.0), GREEDY, Sampling(seed=1, temperature=1.5, top_p=0.9)]
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (g++ or clang++) found")
KINDS = [pytest.param("cpu"), pytest.param("emulated", marks=[pytest.mark.cxx, needs_compiler])]


@contextmanager
def loaded(path: Path, **settings: Any):
    with GGUFFile.open(path) as file:
        engine = load_engine(Settings(**{"threads": 2, "batch": 4, "context": 256, "chunk": 256, **settings}), file)
        try:
            yield engine
        finally:
            engine.close()


def answers(path: Path, count: int, **settings: Any) -> list[list[int]]:
    with loaded(path, **settings) as engine:
        return Client(engine, pages_each=4).answers(PROMPTS, SAMPLINGS, count)


# ---------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("split", [(1,), (3,), (1, 3), (2, 3), (1, 2, 3)])
def test_a_layer_split_changes_no_token_on_the_cpu(split: tuple[int, ...]) -> None:
    assert answers(TINY, 12, layer_split=split) == answers(TINY, 12)


def test_a_tied_head_on_another_stage_than_the_embedding_changes_no_token() -> None:
    assert answers(QWEN3, 12, layer_split=(1,)) == answers(QWEN3, 12)


def test_int8_pages_and_prompts_read_by_rows_are_the_same_in_stages() -> None:
    settings = {"kv": "int8", "deterministic": True}
    assert answers(TINY, 8, layer_split=(1, 2), **settings) == answers(TINY, 8, **settings)


@pytest.mark.cxx
@needs_compiler
@pytest.mark.parametrize("settings", [
    {"layer_split": (2,)}, {"layer_split": (1, 3), "devices": ("0", "1", "0")}, {"layer_split": (1, 3), "peer_copy": True},
    {"layer_split": (1, 2, 3), "devices": ("3", "2", "1", "0")},
])
def test_a_layer_split_changes_no_token_on_the_emulated_device(settings: dict[str, Any]) -> None:
    assert answers(TINY, 4, device="emulated", **settings) == answers(TINY, 4, device="emulated")


# ---------------------------------------------------------------- what each stage holds


def test_a_stage_loads_its_own_layers_alone() -> None:
    with loaded(TINY, layer_split=(1, 3)) as engine:
        first, middle, last = (stage.model for stage in engine.stages)
    assert [len(model.layers) for model in (first, middle, last)] == [1, 2, 1]
    assert [model.kv.data.shape[0] for model in (first, middle, last)] == [1, 2, 1]
    assert hasattr(first, "embedding") and not hasattr(middle, "embedding") and not hasattr(last, "embedding")
    assert hasattr(last, "output") and not hasattr(first, "output") and not hasattr(middle, "output")


@pytest.mark.parametrize("path", [TINY, QWEN3], ids=["untied", "tied"])
def test_the_plan_of_the_cpu_is_what_the_stages_keep(path: Path) -> None:
    with loaded(path, layer_split=(1,)) as engine:
        config = engine.stages[0].model.config
        kept = []
        for stage in engine.stages:
            layers = stage.model.layers
            matrices = [each for layer in layers for each in (layer.qkv, layer.attn_output, layer.dense.gate_up, layer.dense.down)]
            matrices += [stage.model.output] if stage.model.is_last else []
            kept.append(sum(matrix.weights.nbytes for matrix in matrices))
        assert kept == [weight_bytes(config, range(0, 1)), weight_bytes(config, range(1, config.num_layers))]
        assert sum(stage.model.kv.data.nbytes for stage in engine.stages) == engine.facts.num_pages * engine.facts.page_bytes


def test_auto_balances_bytes_with_the_output_matrix_on_the_last() -> None:
    with loaded(TINY, devices=("cpu", "cpu")) as engine:
        assert [len(stage.model.layers) for stage in engine.stages] == [2, 2]
    with GGUFFile.open(TINY) as file:
        parts = Parts(file, read_config(file), lambda tensor: int(np.prod(tensor.shape)))
        sizes = {name: int(np.prod(tensor.shape)) for name, tensor in file.tensors.items()}
        assert parts.output == sizes["output.weight"] + sizes["output_norm.weight"] and parts.embedding == sizes["token_embd.weight"]
        assert parts.of(range(0, 3)) + parts.of(range(3, 4)) == parts.of(range(4)) == sum(sizes.values())


class Card:
    """A device that is asked for its memory and name alone."""

    def __init__(self, name: str, free: int) -> None:
        self.info, self.free, self.total = DeviceInfo(name, 86, free, "0000:41:00.0"), free, free

    def memory(self) -> Card:
        return self


def test_a_small_device_gets_what_fits() -> None:
    """Four layers on two devices, one of them with memory for one layer."""
    settings, large = Settings(batch=2, context=128, chunk=128), Card("card", 1 << 40)
    with GGUFFile.open(TINY) as file:
        config = read_config(file)
        parts = Parts(file, config, lambda tensor: tensor_bytes(tensor, packed=True))
        page = PageShape(1, config.num_kv_heads, config.head_dim, 64).page_bytes
        plan = planner(settings, file, config)

        def split(first: Card, second: Card) -> list[range]:
            return split_over_devices(settings, file, config, [first, second], [None, None])

        assert split(large, large) == [range(0, 2), range(2, 4)]
        for span, wanted in ((range(0, 1), [range(0, 1), range(1, 4)]), (range(3, 4), [range(0, 3), range(3, 4)])):
            small = Card("card", int((parts.of(span) + sum(plan.fixed_bytes(span, 128)) + 6 * page) / 0.95))
            assert (split(small, large) if span.start == 0 else split(large, small)) == wanted
        assert split(Card("card", 1000), large) == [range(0, 2), range(2, 4)], "the plan will say what is missing"


# ---------------------------------------------------------------- devices by name


@pytest.mark.parametrize("settings, words", [
    ({"devices": ("cpu", "0")}, "devices: 0 is not the CPU, where each stage is called cpu; write cpu,cpu"),
    ({"device": "emulated", "devices": ("0", "cpu")}, "devices: cpu is not served beside devices: .* name devices alone"),
    ({"device": "emulated", "devices": ("0", "-1")}, "devices: -1 is no device; devices are called by number: 0,1"),
    ({"device": "emulated", "devices": ("GPU-8932f937",)}, "devices: GPU-8932f937 is no device"),
    ({"devices": ("cpu",) * 5}, "devices: 5 stages, and the model has 4 layers"),
    ({"layer_split": (1, 2), "devices": ("cpu", "cpu")}, "makes 3 stages, and 2 devices are named"),
    ({"trim_stage_weights": False}, "trim_stage_weights: off is not served"),
    ({"device": "emulated", "kv_memory_mib": 1, "context": 100_000}, "kv_memory_mib: 1 MiB are 15 pages of 64 tokens; a context of"),
    ({"kv": "f32", "device": "emulated"}, "kv: f32 is not served on a device; it keeps int8"),
])
def test_devices_and_splits_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    if settings.get("device") == "emulated" and find_compiler() is None:
        pytest.skip("no C++ compiler (g++ or clang++) found")
    with GGUFFile.open(TINY) as file, pytest.raises(SettingError, match=words.replace("(", r"\(")):
        load_engine(Settings(**settings), file)


def test_a_device_that_does_not_open_is_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.devices.host_compiler.find_compiler", lambda command: None)
    with GGUFFile.open(TINY) as file, pytest.raises(StartError, match="needs a C\\+\\+17 compiler"):
        load_engine(Settings(device="emulated"), file)


@pytest.mark.cxx
@needs_compiler
def test_devices_are_opened_with_the_settings(tmp_path: Path) -> None:
    """The compiler that was named compiles, into the folder that was named."""
    with GGUFFile.open(TINY) as file, pytest.raises(StartError, match="--compiler.*no-such-compiler was not found"):
        load_engine(Settings(device="emulated", compiler="no-such-compiler"), file)
    path, *_ = find_compiler() or ("",)
    settings = Settings(device="emulated", compiler=f"{path} -DNAMED", kernel_cache=tmp_path)
    (device,) = open_devices(settings, ["0"])
    assert find_compiler(settings.compiler) == (path, "-DNAMED")
    device.compile([KernelName("add", "add")])
    assert [each.suffix for each in tmp_path.iterdir()] == [".so"]


@pytest.mark.cxx
@needs_compiler
def test_the_order_of_the_devices_is_the_order_of_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices with other memory show which is which; one that is named twice is opened once and shares its memory."""
    limits = iter((1 << 30, 1 << 29))
    monkeypatch.setattr(placement, "EmulatedDevice", lambda **_: EmulatedDevice(memory_limit=next(limits)))
    first, second, third = open_devices(Settings(device="emulated"), ["2", "0", "2"])
    assert first is third and first.memory().total == 1 << 30 and second.memory().total == 1 << 29
    assert free_bytes([first, second, third]) == [1 << 29] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_names_stages_devices_and_layers_the_same_at_every_start(kind: str) -> None:
    with GGUFFile.open(TINY) as file:
        settings = Settings(device=kind, layer_split=(3,), context=128, threads=3)
        lines = describe_engine(settings, file)
        assert lines == describe_engine(settings, file)
    if kind == "emulated":
        assert lines[:2] == [f"device {number}: emulated, 16.0 GiB of memory, 16.0 free" for number in (0, 1)]
        lines = lines[2:]
    names = {"cpu": ["cpu, 2 threads, ", "cpu, 1 thread, "], "emulated": ["emulated, ", "emulated, "]}[kind]
    assert lines[0].startswith(f"stage 0 ({names[0]}layers 0 to 2): weights ")
    assert lines[1].startswith(f"stage 1 ({names[1]}layers 3 to 3): weights ")
    assert lines[2] == "8 slots, 128 tokens a request at most"


def test_a_device_is_named_with_its_place_on_the_bus() -> None:
    assert stage_name(1, Card("NVIDIA H200", 1).info, range(2, 4)) == "stage 1 (NVIDIA H200 0000:41:00.0, layers 2 to 3)"


def test_threads_are_divided_between_stages() -> None:
    before = set(threading.enumerate())
    with loaded(TINY, threads=5, layer_split=(2,)) as engine:
        assert [stage.model.ops.threads.count for stage in engine.stages] == [3, 2]
    for thread in set(threading.enumerate()) - before:
        thread.join(30)


# ---------------------------------------------------------------- failures and times


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_that_fails_is_named_and_the_others_go_on(kind: str) -> None:
    with loaded(TINY, device=kind, layer_split=(2,), batch=2) as engine:
        client = Client(engine, pages_each=4)
        client.run("prompt", client.segment(0, 0, [5, 6, 7], GREEDY))
        model, good = engine.stages[1].model, engine.stages[1].model.forward

        def fail(window: Window, hidden: object) -> None:
            raise RuntimeError("lost the device")

        model.forward = fail
        engine.submit(Window(77, "decode", 0, (client.segment(0, 3, [9], GREEDY),)))
        event = client.events.get(timeout=300)
        assert isinstance(event, EngineFailed) and event.window_ids == (77,)
        assert event.message == f"stage 1 ({kind}, layers 2 to 3): RuntimeError: lost the device"
        model.forward = good
        assert client.run("decode", client.segment(0, 3, [9], GREEDY))[0].picks


def test_a_window_tells_the_time_it_took_on_each_stage() -> None:
    with loaded(TINY, layer_split=(1, 3)) as engine:
        client = Client(engine)
        engine.submit(Window(1, "prompt", 0, (Segment("r", 0, 0, (5, 6), (0,), GREEDY),)))
        done = client.events.get(timeout=300)
    assert isinstance(done, WindowDone) and len(done.stage_seconds) == 3 and min(done.stage_seconds) > 0
    assert done.seconds == pytest.approx(sum(done.stage_seconds))
