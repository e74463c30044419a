"""Compilation for GPUs, on machines without one. Needs NVRTC (the extra cuda12 or cuda13), which finds no driver here."""

import json
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from strata.devices import nvrtc, source
from strata.devices.base import Buffer, CompileError, KernelName
from strata.devices.cuda import group_by_stem, pack_arguments

needs_nvrtc = pytest.mark.skipif(nvrtc.load_library() is None, reason="NVRTC is not installed (nvidia-cuda-nvrtc-cu12)")


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_120"])
def test_a_source_becomes_an_elf_file_with_its_entries(arch):
    cubin, names = nvrtc.compile_cubin("intrinsics", ["intrinsics"], arch)
    assert cubin.startswith(b"\x7fELF") and names["intrinsics"].encode() in cubin


@needs_nvrtc
def test_modules_are_compiled_in_processes_and_read_back_from_the_cache(tmp_path, monkeypatch):
    first = nvrtc.compile_modules({"intrinsics": ["intrinsics"]}, "sm_80", tmp_path)["intrinsics"]
    monkeypatch.setattr(nvrtc.subprocess, "run", None)  # a second compilation would fail
    again = nvrtc.compile_modules({"intrinsics": ["intrinsics"]}, "sm_80", tmp_path)["intrinsics"]
    assert again == first and first.cubin.read_bytes().startswith(b"\x7fELF")
    assert json.loads(first.cubin.with_suffix(".json").read_text())["seconds"] == first.seconds > 0


@needs_nvrtc
def test_a_compile_error_names_the_real_file_and_line(tmp_path, monkeypatch):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "strata.cuh").write_text("")
    (tmp_path / "broken.cu").write_text("\n__global__ void broken(float* out) { out[0] = nothing; }\n")
    monkeypatch.setattr(source, "SOURCE_FOLDER", tmp_path)
    with pytest.raises(CompileError, match=r"broken.cu\(2\): error: identifier .nothing. is undefined"):
        nvrtc.compile_cubin("broken", ["broken"], "sm_80")


@pytest.mark.parametrize("wheel, place", [
    ("nvidia-cuda-nvrtc-cu12", "cuda_nvrtc/lib/libnvrtc.so.12"), ("nvidia-cuda-nvrtc", "cu13/lib/libnvrtc.so.13"),
])  # fmt: skip
def test_what_the_extras_install_is_found(wheel, place, tmp_path, monkeypatch):
    """CuPy's wheels bring no compiler: where there is no toolkit either, the extra is all that there is."""
    setup = ConfigParser()
    setup.read(Path(__file__).parent.parent.parent / "setup.cfg")
    extra = {"nvidia-cuda-nvrtc-cu12": "cuda12", "nvidia-cuda-nvrtc": "cuda13"}[wheel]
    assert wheel in [line.split()[0] for line in setup["options.extras_require"][extra].splitlines() if line]
    library = tmp_path / "nvidia" / place
    library.parent.mkdir(parents=True)
    library.touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: spec)
    assert next(nvrtc._candidates(tmp_path / "nowhere")) == str(library)


def test_kernels_are_grouped_into_one_module_per_source():
    names = [KernelName("a", "f<1>"), KernelName("b", "g"), KernelName("a", "f<2>"), KernelName("a", "f<1>")]
    assert group_by_stem(names) == {"a": ["f<1>", "f<2>"], "b": ["g"]}


def test_only_what_has_a_size_is_passed_to_a_kernel():
    buffer = Buffer(4096, (4,), np.dtype(np.float32))
    packed = pack_arguments([buffer, np.int32(3), np.float32(0.5)])
    assert [item.tobytes() for item in packed] == [(4096).to_bytes(8, "little"), b"\3\0\0\0", np.float32(0.5).tobytes()]
    for bad in (3, 0.5, np.float64(1), np.zeros(3, np.float32)):
        with pytest.raises(TypeError, match="argument 0"):
            pack_arguments([bad])


def test_missing_sources_are_reported_with_their_path(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "SOURCE_FOLDER", tmp_path / "nowhere")
    with pytest.raises(source.StartError, match="nowhere"):
        source.source_folder()
