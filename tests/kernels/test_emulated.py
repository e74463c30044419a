"""The emulated device itself: it must find the mistakes it is made for."""

import gc
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from strata.devices import source
from strata.devices.base import Buffer, CompileError, DeviceError, DeviceLost, KernelName, Launch
from strata.devices.emulated import EmulatedDevice
from strata.kernels.intrinsics import intrinsics

pytestmark = pytest.mark.cxx

FAULTY = r"""
#include "strata.cuh"

__global__ void half_barrier(float* out) {
  if (threadIdx.x < 40) __syncthreads();
  __syncwarp();
  out[threadIdx.x] = 1.0f;
}

__global__ void half_barrier_and_exit(float* out) {
  if (threadIdx.x < 40) return;
  __syncthreads();
  out[threadIdx.x] = 1.0f;
}

__global__ void divergent(float* out) {
  out[threadIdx.x] = threadIdx.x % 2 ? warp_sum(1.0f) : __shfl_sync(ALL_LANES, 1.0f, 0);
}

template <bool barrier> __global__ void neighbour(const float* in, float* out) {
  struct Shared { float value[64]; };
  SHARED(Shared, shared);
  shared.value[threadIdx.x] = in[threadIdx.x];
  if (barrier) __syncthreads();
  out[64 * blockIdx.x + threadIdx.x] = shared.value[63 - threadIdx.x];
}

__global__ void scale(float* values, int count, float factor) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] *= factor;
}

__global__ void deep(int* out) {
  volatile char room[40000];
  for (int i = 0; i < 40000; i++) room[i] = (char)i;
  out[threadIdx.x] = room[threadIdx.x];
}
"""
MISSPELT = "\n__global__ void misspelt(float* out) { out[0] = undeclared_name; }\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A source folder that holds ``FAULTY`` as lab.cu."""
    shutil.copytree(source.SOURCE_FOLDER / "include", tmp_path / "include")
    (tmp_path / "lab.cu").write_text(FAULTY)
    monkeypatch.setattr(source, "SOURCE_FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def lab(folder):
    return lambda **options: EmulatedDevice(cache=folder / "cache", **options)


def run(device, entry, arguments, blocks=1, threads=64):
    stream = device.stream()
    device.launch(Launch(KernelName("lab", entry), (blocks, 1, 1), threads), arguments, stream)
    stream.synchronize()


def read(device, buffer):
    stream, host = device.stream(), np.zeros(buffer.shape, buffer.dtype)
    device.download(host, buffer, stream)
    stream.synchronize()
    return host


def test_a_barrier_that_some_threads_miss_is_reported(lab):
    device = lab()
    with pytest.raises(DeviceError, match=r"half_barrier: (deadlock|divergent warp)"):
        run(device, "half_barrier", [device.allocate([64], np.float32)])
    out = device.allocate([64], np.float32)  # the device is usable afterwards; threads that have ended do not count
    run(device, "half_barrier_and_exit", [out])
    assert read(device, out)[40:].tolist() == [1.0] * 24


def test_a_stream_whose_work_failed_and_those_that_wait_for_it_report_it_for_good(lab):
    device = lab()
    broken, behind, event = device.stream(), device.stream(), device.event()
    device.launch(Launch(KernelName("lab", "half_barrier"), (1, 1, 1), 64), [device.allocate([64], np.float32)], broken)
    broken.record(event)
    behind.wait(event)
    for _ in range(2):
        for stream in (behind, broken):
            with pytest.raises(DeviceLost, match="half_barrier"):
                stream.synchronize()
    with pytest.raises(DeviceLost, match="half_barrier"):
        event.synchronize()


def test_lanes_at_different_collectives_are_reported(lab):
    device = lab()
    with pytest.raises(DeviceError, match="divergent warp 0 in block .* a shuffle"):
        run(device, "divergent", [device.allocate([64], np.float32)])


def test_a_missing_barrier_reads_nan(lab):
    values = np.arange(64, dtype=np.float32)
    for descending in (False, True):
        device = lab(descending=descending)
        stream, given, out = device.stream(), device.allocate([64], np.float32), device.allocate([128], np.float32)
        device.upload(given, values, stream)
        stream.synchronize()
        run(device, "neighbour<true>", [given, out], blocks=2)
        assert read(device, out).tolist() == [*values[::-1], *values[::-1]]
        run(device, "neighbour<false>", [given, out], blocks=2)
        assert np.isnan(read(device, out)).sum() == 64  # half of each block, the second one too


def test_arguments_that_do_not_fit_the_kernel_are_refused(lab):
    device = lab()
    values = device.allocate([8], np.float32)
    good = [values, np.int32(8), np.float32(2)]
    for position, bad in [(0, device.allocate([8], np.int32)), (1, np.int64(8)), (2, np.float64(2)), (1, values)]:
        with pytest.raises(TypeError, match=f"argument {position}"):
            run(device, "scale", [*good[:position], bad, *good[position + 1:]])
    with pytest.raises(TypeError, match="takes 3 arguments, 2"):
        run(device, "scale", good[:2])
    for threads in (16, 33, 2048):
        with pytest.raises(DeviceError, match="bad launch"):
            run(device, "scale", good, threads=threads)
    with pytest.raises(DeviceError, match="bad launch"):
        device.launch(Launch(KernelName("lab", "scale"), (1, 65536, 1), 32), good, device.stream())


def test_work_runs_only_when_it_is_waited_for(lab):
    device = lab()
    first, second, event = device.stream(), device.stream(), device.event()
    values, host = device.allocate([4], np.float32), device.pinned([4], np.float32)
    host[:] = 1
    device.upload(values, host, first)
    host[:] = 3  # too early on a real device as well: the copy may not have run
    device.launch(Launch(KernelName("lab", "scale"), (1, 1, 1), 32), [values, np.int32(4), np.float32(2)], first)
    first.record(event)
    assert not event.query()
    second.wait(event)
    out = np.zeros(4, np.float32)
    device.download(out, values, second)
    assert out.tolist() == [0] * 4
    second.synchronize()
    assert out.tolist() == [6] * 4 and event.query()


def test_streams_of_two_threads_can_wait_for_each_other():
    """What each adds needs what the other added before: a thread that holds its own stream while it waits would never end."""
    device, order = EmulatedDevice(), []
    streams, events = [device.stream(), device.stream()], [device.event() for _ in range(20)]
    for step, event in enumerate(events):
        stream = streams[step % 2]
        if step:
            stream.wait(events[step - 1])
        stream.enqueue(lambda step=step: order.append(step))
        stream.record(event)
    together = threading.Barrier(2, timeout=300)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda stream: (together.wait(), stream.synchronize()), streams))
    assert order == list(range(20)) and all(event.query() for event in events)


def test_timed_events_pass_when_their_stream_runs():
    device = EmulatedDevice()
    stream, start, end = device.stream(), device.timed_event(), device.timed_event()
    stream.record(start)
    stream.enqueue(lambda: sum(range(1000)))
    stream.record(end)
    assert not end.query()
    stream.synchronize()
    assert end.query() and device.seconds_between(start, end) == -device.seconds_between(end, start) > 0
    assert device.reach(EmulatedDevice())


def test_a_graph_replays_its_launches_and_forbids_what_cuda_forbids(lab):
    device = lab()
    stream, values = device.stream(), device.allocate([4], np.float32)
    device.upload(values, np.ones(4, np.float32), stream)
    stream.synchronize()
    device.compile([KernelName("lab", "scale")])
    with device.capture(stream) as graph:
        device.launch(Launch(KernelName("lab", "scale"), (1, 1, 1), 32), [values, np.int32(3), np.float32(2)], stream)
        with pytest.raises(DeviceError, match="captured"):
            device.allocate([4], np.float32)
        with pytest.raises(DeviceError, match="captured"):
            stream.synchronize()
        with pytest.raises(DeviceError, match="lab.cu: half_barrier would be compiled while"):
            device.launch(Launch(KernelName("lab", "half_barrier"), (1, 1, 1), 64), [values], stream)
    assert read(device, values).tolist() == [1] * 4
    graph.replay(stream)
    graph.replay(stream)
    stream.synchronize()
    assert read(device, values).tolist() == [4, 4, 4, 1]


def test_memory_is_counted_and_its_limit_kept(lab):
    device = lab(memory_limit=1000)
    first = device.allocate([10, 10], np.float32)
    assert np.isnan(read(device, first)).all()
    assert device.memory().free == 600
    with pytest.raises(DeviceError, match="700 bytes asked for, 600 free"):
        device.allocate([700], np.uint8)
    view = first.rows(2, 4)
    del first
    gc.collect()
    assert device.memory().free == 600  # the view keeps it
    assert view.shape == (2, 10)
    del view
    gc.collect()
    assert device.memory().free == 1000


def test_views_stay_inside_and_aligned():
    whole = Buffer(4096, (4, 6), np.dtype(np.float32))
    assert whole.view([3], np.int64, 8).pointer == 4104
    assert whole.rows(1, 3).pointer == 4096 + 24
    for bad in [([97], np.uint8, 0), ([1], np.float32, 96), ([1], np.float32, -4), ([1], np.float32, 2)]:
        with pytest.raises(ValueError):
            whole.view(bad[0], bad[1], bad[2])


def test_a_kernel_too_deep_for_a_stack_and_an_unknown_one_are_refused(lab):
    device = lab()
    with pytest.raises(CompileError, match="frame size"):
        run(device, "deep", [device.allocate([32], np.int32)], threads=32)
    with pytest.raises(CompileError, match=r"lab.cu: no_such does not compile"):
        device.compile([KernelName("lab", "no_such")])


def test_compiler_messages_name_the_real_file_and_line(lab, folder):
    (folder / "lab.cu").write_text(FAULTY + MISSPELT)
    line = FAULTY.count("\n") + 2
    with pytest.raises(CompileError, match=rf"lab.cu:{line}:.*undeclared_name"):
        lab().compile([KernelName("lab", "misspelt")])


@pytest.mark.skipif(os.name == "nt", reason="Windows has no ucontext")
@pytest.mark.parametrize("descending", [False, True])
def test_the_systems_own_stack_switches_give_the_same_bits(rng, descending):
    """The way of machines that fibers.cuh has no switch of its own for."""
    words, results = rng.integers(0, 2**32, (32, 8), dtype=np.uint32), []
    words[:, :2] &= 0x3FFF3FFF  # no NaN: its payload may differ
    for ucontext in (False, True):
        device = EmulatedDevice(ucontext=ucontext, descending=descending)
        stream, got = device.stream(), np.zeros((32, 24), np.uint32)
        given, out = device.allocate(words.shape, np.uint32), device.allocate(got.shape, np.uint32)
        device.upload(given, words, stream)
        intrinsics(device, given, out, stream)
        device.download(got, out, stream)
        stream.synchronize()
        results.append(got)
    np.testing.assert_array_equal(*results)
