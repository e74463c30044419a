"""Which GPUs a server takes and what it says of them, with CuPy's answers made up: no GPU is needed to be told that there is none."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from strata.config import Settings
from strata.devices import cuda, cuda_stream
from strata.engine import load, placement
from strata.engine.load import describe_engine
from strata.errors import SettingError, StartError
from strata.weights.gguf import GGUFFile
from tests.cuda.fake import Driver, fake_cupy
from tests.engine.running import TINY


UUIDS = [
    "GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5", "GPU-b8eb0000-276c-c9cb-b366-c6fa655957c5", "GPU-12345678-276c-c9cb-b366-c6fa655957c5",
    "GPU-00000000-276c-c9cb-b366-c6fa655957c5", "", "GPU-abcdef00-276c-c9cb-b366-c6fa655957c5",
]  # fmt: skip


def plan(monkeypatch: pytest.MonkeyPatch, *cards: tuple[str, str, int, int], error: str = "", **settings: Any) -> list[str]:
    driver = Driver(*cards, error=error)
    monkeypatch.setattr(cuda, "load_cupy", lambda: fake_cupy(driver))
    monkeypatch.setattr(cuda, "gpu_uuids", lambda count: UUIDS[:count])
    monkeypatch.setattr(cuda_stream, "_here", threading.local())
    monkeypatch.setattr(load, "needed_rates", lambda file, devices, cache: [None] * len(devices))
    monkeypatch.setattr(placement, "gpu_uuids", lambda count: UUIDS[:count])
    with GGUFFile.open(TINY) as file:
        return describe_engine(Settings(**{"device": "cuda", "context": 128, "batch": 2, **settings}), file)


def test_every_visible_gpu_is_taken_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = plan(monkeypatch, ("NVIDIA H200", "9.0", 143_000, 140_000), ("NVIDIA GeForce RTX 4090", "8.9", 24_564, 24_000))
    assert lines[0] == f"device 0: NVIDIA H200, 0000:40:00.0, {UUIDS[0]}, sm_90, 139.6 GiB of memory, 136.7 free"
    assert lines[1] == f"device 1: NVIDIA GeForce RTX 4090, 0000:41:00.0, {UUIDS[1]}, sm_89, 24.0 GiB of memory, 23.4 free"
    assert lines[2].startswith("stage 0 (NVIDIA H200 0000:40:00.0, layers 0 to 1): weights ")
    assert lines[3].startswith("stage 1 (NVIDIA GeForce RTX 4090 0000:41:00.0, layers 2 to 3): weights ")
    assert lines[4] == "2 slots, 128 tokens a request at most"


def test_no_more_gpus_than_layers_and_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [("card", "8.6", 10_000, 9_000)] * 6
    assert sum(line.startswith("stage") for line in plan(monkeypatch, *cards)) == 4
    assert [line[:9] for line in plan(monkeypatch, *cards, devices=("3", "1"))[:3]] == ["device 3:", "device 1:", "stage 0 ("]
    assert sum(line.startswith("stage") for line in plan(monkeypatch, *cards, layer_split=(1,))) == 2


def test_gpus_are_found_by_uuid_and_one_is_one_by_whatever_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [("card", "8.6", 10_000, 9_000)] * 6
    lines = plan(monkeypatch, *cards, devices=("GPU-12345678", "b8ea", UUIDS[3].upper(), "2"))
    assert [line.split(",")[1] for line in lines[:4]] == [" 0000:42:00.0", " 0000:40:00.0", " 0000:43:00.0", " 0000:42:00.0"]
    assert lines[0].startswith(f"device GPU-12345678: card, 0000:42:00.0, {UUIDS[2]}, sm_86")
    stages = [line.partition(",")[0] for line in lines if line.startswith("stage")]
    assert stages == [f"stage {n} (card 0000:4{gpu}:00.0" for n, gpu in enumerate((2, 0, 3, 2))]
    opened = placement.open_devices(Settings(device="cuda"), ["GPU-12345678", "b8ea", "2"])
    assert opened[0] is opened[2] is not opened[1], "or both would count the same memory as theirs"


@pytest.mark.parametrize("name, words", [
    ("GPU-b8e", "devices: GPU-b8e names more than one visible GPU; 0 is GPU-b8ea3855-"),
    ("GPU-dead", "devices: GPU-dead names no visible GPU; .* 2 is GPU-12345678"),
    ("cpu", "devices: cpu is not served beside devices"),
    ("b8", "devices: b8 is no device; devices are called by number: 0,1, or by UUID"),
    ("H200", "devices: H200 is no device"),
])
def test_a_name_that_is_no_gpu_or_several_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        plan(monkeypatch, *[("card", "8.6", 10_000, 9_000)] * 3, devices=("0", name))


@pytest.mark.parametrize("cards, settings, words", [
    ([("old", "7.0", 16_000, 15_000)], {}, "GPU 0, old, has compute capability 7.0; the kernels need 7.5 or newer"),
    ([("card", "8.6", 16_000, 15_000)], {"devices": ("1",)}, "no GPU 1: 1 visible, numbered from 0"),
    ([], {}, "no GPU is visible: look at CUDA_VISIBLE_DEVICES"),
    ([], {"error": "cudaErrorInsufficientDriver"}, "no GPU can be used (cudaErrorInsufficientDriver): install or update the NVIDIA driver"),
])
def test_what_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch, cards: list[Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(StartError) as raised:
        plan(monkeypatch, *cards, **settings)
    assert str(raised.value).startswith(words)


def test_a_model_that_does_not_fit_is_refused_by_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match=r"model: stage 0, layers 0 to 3, needs \d+ MiB \(\d+ for weights\) and 4 are free for it"):
        plan(monkeypatch, ("small", "8.6", 16, 5))
    with pytest.raises(SettingError, match=r"context: one conversation of 4000 tokens .* the largest that fits is --context \d+"):
        plan(monkeypatch, ("small", "8.6", 16, 13), context=4000)


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(cuda.importlib, "import_module", missing)
    with GGUFFile.open(TINY) as file, pytest.raises(StartError, match="install the extra cuda12 or cuda13, or use --device cpu"):
        describe_engine(Settings(device="cuda"), file)
