"""Which extra a driver gets: the driver's answers are made up, its calls are the real ones."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

import _gpu  # noqa: E402
import serve  # noqa: E402


class Driver:
    """``version`` None: it does not answer; ``init``: what cuInit says."""

    def __init__(self, version: int | None, count: int = 1, init: int = 0) -> None:
        self._version, self._count, self._init = version, count, init

    def cuDriverGetVersion(self, out: Any) -> int:
        if self._version is None:
            return 3
        ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = self._version
        return 0

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuDeviceGetCount(self, out: Any) -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = self._count
        return 0


@pytest.mark.parametrize("driver, extra, words", [
    (Driver(12040), "cuda12", "NVIDIA driver for CUDA 12.4 and 1 GPU: taking the extra cuda12"),
    (Driver(13010, count=4), "cuda13", "NVIDIA driver for CUDA 13.1 and 4 GPUs: taking the extra cuda13"),
    (Driver(14000), "cuda13", "NVIDIA driver for CUDA 14.0 and 1 GPU: taking the extra cuda13"),
    (Driver(11080), None, "NVIDIA driver for CUDA 11.8 and 1 GPU: too old, update the driver for CUDA 12 or newer"),
    (Driver(12080, count=0), None, "NVIDIA driver for CUDA 12.8, but no GPU to use"),
    (Driver(12080, init=100), None, "NVIDIA driver for CUDA 12.8, but no GPU to use (error 100)"),
    (Driver(None), None, "the NVIDIA driver does not answer"),
])  # fmt: skip
def test_the_newest_extra_that_the_driver_covers(driver: Driver, extra: str | None, words: str) -> None:
    assert _gpu.find_extra(lambda: driver) == (extra, words)


def test_no_driver() -> None:
    def load() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    assert _gpu.find_extra(load) == (None, "no NVIDIA driver found")


@pytest.mark.parametrize("flags, environ, found, wanted", [
    ([], {}, ("cuda12", "words"), (("cuda12",), ["--device", "cuda"])),
    ([], {}, (None, "words"), ((), [])),
    (["--device", "cpu"], {}, ("cuda12", "words"), ((), ["--device", "cpu"])),
    (["--device", "cuda"], {}, ("cuda13", "words"), (("cuda13",), ["--device", "cuda"])),
    (["--device=cuda"], {}, ("cuda13", "words"), (("cuda13",), ["--device=cuda"])),
    ([], {"STRATA_DEVICE": "emulated"}, ("cuda12", "words"), ((), [])),
    (["--kv", "f32"], {}, ("cuda12", "words"), ((), ["--kv", "f32"])),
])  # fmt: skip
def test_a_gpu_is_taken_unless_something_else_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], environ: dict[str, str], found: Any, wanted: Any
) -> None:
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(serve, "find_extra", lambda: found)
    loaded = serve.asked_for(flags)
    assert loaded is not None
    extras, chosen = serve.choose_device(loaded, flags)
    assert (extras, chosen) == wanted
    assert ("words" in capsys.readouterr().err) == bool(extras)


def test_gpus_that_were_asked_for_and_are_not_there_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_extra", lambda: (None, "no NVIDIA driver found"))
    loaded = serve.asked_for(["--device", "cuda"])
    with pytest.raises(serve.Problem, match="--device cuda: no NVIDIA driver found"):
        serve.choose_device(loaded, ["--device", "cuda"])


class NoPackages:
    """An environment into which nothing for GPUs can be installed."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def ensure(self, extras: tuple[str, ...] = (), wheels: str | None = None) -> None:
        self.asked.append(extras)
        if extras:
            raise serve.Problem("pip cannot find cupy-cuda12x")


def test_packages_that_nobody_asked_for_are_no_reason_not_to_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_extra", lambda: ("cuda12", "words"))
    for flags in ([], ["--device", "cuda"]):
        venv, loaded = NoPackages(), serve.asked_for(flags)
        extras, chosen = serve.choose_device(loaded, flags)
        if flags:
            with pytest.raises(serve.Problem, match="cupy-cuda12x"):
                serve.install(venv, extras, None, loaded, chosen)  # type: ignore[arg-type]
        else:
            assert serve.install(venv, extras, None, loaded, chosen) == []  # type: ignore[arg-type]
            assert venv.asked == [("cuda12",), ()] and "going on with the processors" in capsys.readouterr().err
