"""What the CUDA device asks of CuPy, on a CuPy that writes it down: a call from the wrong thread, or out of order, shows without a GPU."""

from __future__ import annotations

import importlib.util
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from strata.devices import cuda, cuda_stream
from strata.devices.base import DeviceError, DeviceLost, KernelName, Launch
from strata.devices.driver import gpu_uuids
from strata.devices.nvrtc import Module
from tests.cuda.fake import Driver, fake_cupy

CARDS = [("card", "8.6", 64, 32)] * 3
KERNEL = KernelName("lab", "scale")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Three GPUs, of which the first two reach each other."""
    driver = Driver(*CARDS, peers=((0, 1), (1, 0)))
    monkeypatch.setattr(cuda, "load_cupy", lambda: fake_cupy(driver))
    monkeypatch.setattr(cuda, "gpu_uuids", lambda count: [""] * count)
    monkeypatch.setattr(cuda_stream, "_here", threading.local())
    monkeypatch.setattr(cuda, "compile_modules", compiled)
    return driver


def compiled(wanted: dict[str, list[str]], arch: str, cache: Path, toolkit: Path | None) -> dict[str, Module]:
    return {stem: Module(Path(f"{stem}-{arch}.cubin"), {entry: f"_{entry}" for entry in entries}, 0.1) for stem, entries in wanted.items()}


def elsewhere(work: Any) -> Any:
    """``work`` in a thread that has never touched a GPU."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def launch(device: cuda.CudaDevice, stream: Any, *arguments: Any) -> None:
    device.launch(Launch(KERNEL, (2, 1, 1), 64), arguments, stream)


def test_every_call_is_made_on_its_own_gpu_whatever_thread_it_comes_from(machine: Driver) -> None:
    first, second = cuda.CudaDevice(0), cuda.CudaDevice(2)
    stream, timed, host = second.stream(), second.timed_event(), second.pinned((4,), np.float32)
    buffer = second.allocate((4,), np.float32)
    assert first.memory().total == 64 << 20
    machine.calls.clear()

    def work() -> None:
        second.pinned((3,), np.int8)
        second.upload(buffer, host, stream)
        launch(second, stream, buffer, np.int32(4))
        with second.capture(stream) as graph:
            launch(second, stream, buffer, np.int32(4))
        graph.replay(stream)
        stream.record(timed)
        stream.wait(timed)
        second.download(host, buffer, stream)
        timed.synchronize()
        stream.synchronize()
        second.memory()
        second.seconds_between(timed, timed)
        second.event()
        second.stream()

    elsewhere(work)
    assert {ordinal for _, ordinal in machine.calls} == {2}
    assert machine.names == [
        "pinned", "copy", "load", "launch _scale", "begin capture", "launch _scale", "end capture", "replay", "record", "stream waits",
        "copy", "wait for event", "synchronize", "memory", "elapsed", "event", "stream",
    ]  # fmt: skip


def test_copies_move_bytes_and_empty_ones_are_not_made(machine: Driver) -> None:
    device = cuda.CudaDevice(1)
    stream, buffer, other = device.stream(), device.allocate((2, 3), np.float32), device.allocate((6,), np.int32)
    given = np.arange(6, dtype=np.float32).reshape(2, 3)
    got = device.pinned((6,), np.int32)
    device.upload(buffer, given, stream)
    device.copy(other, buffer, stream)
    device.download(got, other, stream)
    assert got.view(np.float32).tolist() == given.reshape(-1).tolist()
    copies = machine.names.count("copy")
    device.upload(buffer.rows(0, 0), given[:0], stream)
    assert machine.names.count("copy") == copies
    with pytest.raises(ValueError, match="copy of 12 bytes into 24"):
        device.copy(other, buffer.rows(0, 1), stream)
    with pytest.raises(TypeError, match="copy between float64"):
        device.upload(buffer, given.astype(np.float64), stream)


def test_arguments_reach_a_kernel_with_their_own_sizes_and_stay_alive_in_a_graph(machine: Driver) -> None:
    device = cuda.CudaDevice()
    assert device.compile([KERNEL, KERNEL, KernelName("lab", "other")]) >= 0
    assert machine.names.count("load") == 1, "one module for a source"
    stream, buffer = device.stream(), device.allocate((4,), np.float32)
    with device.capture(stream) as graph:
        launch(device, stream, buffer, np.int32(4), np.float32(2))
    assert graph.kept == [buffer, np.int32(4), np.float32(2)]
    arguments = device._functions[KERNEL].arguments
    assert [type(one) for one in arguments] == [np.uint64, np.int32, np.float32] and arguments[0] == buffer.pointer
    with pytest.raises(TypeError, match="kernel argument 1 is a int"):
        launch(device, stream, buffer, 4)


def test_a_capture_is_of_one_stream_and_one_thread(machine: Driver) -> None:
    """Two stages on one GPU: what the other one does meanwhile is not part of the graph, and not forbidden."""
    device = cuda.CudaDevice()
    device.compile([KERNEL])
    stream, other, buffer = device.stream(), device.stream(), device.allocate((4,), np.float32)
    with device.capture(stream) as graph:
        with pytest.raises(DeviceError, match="allocation while a graph is being captured"):
            device.allocate((4,), np.float32)
        with pytest.raises(DeviceError, match="lab.cu: fresh would be compiled while"):
            device.launch(Launch(KernelName("lab", "fresh"), (1, 1, 1), 32), [], stream)
        elsewhere(lambda: (launch(device, other, buffer), device.allocate((4,), np.float32)))
        assert graph.kept == []
    device.allocate((4,), np.float32)


def test_a_capture_that_breaks_off_is_ended(machine: Driver) -> None:
    device = cuda.CudaDevice()
    stream = device.stream()
    with pytest.raises(ZeroDivisionError), device.capture(stream):
        raise ZeroDivisionError
    assert machine.names[-1] == "end capture" and not stream.handle.is_capturing
    device.allocate((4,), np.float32)
    with device.capture(stream):
        pass


def test_an_event_that_was_never_recorded_has_passed(machine: Driver) -> None:
    device = cuda.CudaDevice()
    stream, event = device.stream(), device.event()
    machine.calls.clear()
    assert event.query()
    event.synchronize()
    stream.wait(event)
    assert machine.calls == []
    start, end = device.timed_event(), device.timed_event()
    stream.record(start)
    stream.record(end)
    assert device.seconds_between(start, end) == pytest.approx(1e-3), "CUDA counts in milliseconds"
    assert start.handle.is_timed and not event.handle.is_timed


def test_a_lost_gpu_and_a_full_one_are_told_apart(machine: Driver) -> None:
    device, other = cuda.CudaDevice(1), cuda.CudaDevice(0)
    stream, buffer = device.stream(), device.allocate((4,), np.float32)
    device.compile([KERNEL])
    with pytest.raises(DeviceError, match="out of memory on card 0000:41:00.0: 67108864 bytes asked for, 33554432 free") as full:
        device.allocate((16 << 20,), np.float32)
    assert not isinstance(full.value, DeviceLost)
    machine.lost.add(1)
    host = np.zeros(4, np.float32)
    for call in (
        stream.synchronize, device.memory, lambda: launch(device, stream, buffer), lambda: device.upload(buffer, host, stream),
        lambda: device.allocate((4,), np.int8), lambda: device.pinned((4,), np.int8), device.event,
    ):  # fmt: skip
        with pytest.raises(DeviceLost, match="card 0000:41:00.0: cudaError 700"):
            call()
    assert other.memory().free == 32 << 20


def test_peers_are_reached_where_the_hardware_can(machine: Driver) -> None:
    first, second, third = (cuda.CudaDevice(number) for number in range(3))
    assert first.reach(second) and first.reach(second) and second.reach(first) and first.reach(cuda.CudaDevice(0))
    assert machine.enabled == {(0, 1), (1, 0)}
    assert not first.reach(third) and not first.reach(SimpleNamespace())


def test_uuids_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A UUID with zero bytes; one GPU that does not say; a driver that does not answer, or is not there."""
    known = UUID("b8ea3855-0000-c9cb-b366-c6fa655957c5")

    def ask(raw: Any, device: Any) -> int:
        raw[:] = known.bytes
        return int(device.value != 0)

    def get(device: Any, number: int) -> int:
        device._obj.value = number
        return 0

    def absent() -> Any:
        raise OSError

    driver = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGet=get, cuDeviceGetUuid_v2=ask)
    assert gpu_uuids(2, lambda: driver) == [f"GPU-{known}", ""]
    old = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGet=get, cuDeviceGetUuid=ask)
    assert gpu_uuids(1, lambda: old) == [f"GPU-{known}"]
    broken = SimpleNamespace(cuInit=lambda flags: 999, cuDeviceGet=get, cuDeviceGetUuid=ask)
    assert gpu_uuids(1, lambda: broken) == [""] and gpu_uuids(2, absent) == ["", ""]


def names_of(owner: Any) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def test_cupy_has_what_the_fake_has() -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    import cupy  # type: ignore[import-not-found,unused-ignore]

    fake = fake_cupy(Driver(*CARDS))
    assert [name for name in names_of(type(fake.cuda.runtime)) if not hasattr(cupy.cuda.runtime, name)] == []
    assert [name for name in names_of(fake.cuda) if not hasattr(cupy.cuda, name)] == []
    assert cupy.cuda.runtime.memcpyDefault == 4 and cupy.cuda.runtime.hostAllocPortable == 1
    assert {"non_blocking"} <= set(inspect.signature(cupy.cuda.Stream.__init__).parameters)
    assert {"block", "disable_timing"} <= set(inspect.signature(cupy.cuda.Event.__init__).parameters)
    assert all(hasattr(cupy.cuda.Stream, name) for name in ("record", "wait_event", "synchronize", "begin_capture", "end_capture"))
    assert all(hasattr(cupy.RawKernel, name) for name in ("kernel", "num_regs")) and hasattr(cupy.cuda.Graph, "launch")
    assert issubclass(cupy.cuda.runtime.CUDARuntimeError, RuntimeError)
    assert memoryview(cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(0), 0)).format == "b"
