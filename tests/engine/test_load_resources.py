"""What a process may use, read from made-up /proc and cgroup folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from strata.engine import resources

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cgroups and /proc are Linux's")

GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", "MemTotal:  16777216 kB\nMemFree:  100 kB\nMemAvailable:  8388608 kB\n")
    write(tmp_path / "proc/self/cgroup", "5:cpu:/x\n0::/pod/box\n")
    (tmp_path / "cg/pod/box").mkdir(parents=True)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def free(system: Path) -> int | None:
    return resources.free_memory(system / "cg", system / "proc")


def processors(system: Path) -> int:
    return resources.processors(system / "cg", system / "proc")


def test_without_limits_memory_is_what_the_kernel_calls_available(system: Path) -> None:
    write(system / "cg/pod/box/memory.max", "max\n")
    assert free(system) == 8 * GIB


@pytest.mark.parametrize("folder", ["pod", "pod/box"])
def test_a_container_limit_counts_at_any_depth_and_file_cache_is_free(system: Path, folder: str) -> None:
    write(system / f"cg/{folder}/memory.max", f"{4 * GIB}\n")
    write(system / f"cg/{folder}/memory.current", f"{3 * GIB}\n")
    assert free(system) == GIB
    write(system / f"cg/{folder}/memory.stat", f"anon {2 * GIB}\nactive_file {GIB // 2}\ninactive_file {GIB // 4}\n")
    assert free(system) == GIB + 3 * GIB // 4


def test_a_container_over_its_limit_has_nothing_free(system: Path) -> None:
    write(system / "cg/pod/memory.max", "1000")
    write(system / "cg/pod/memory.current", "5000")
    assert free(system) == 0


def test_a_path_out_of_the_cgroups_is_not_followed(system: Path) -> None:
    write(system / "proc/self/cgroup", "0::/../../elsewhere\n")
    assert resources.own_cgroups(system / "cg", system / "proc") == [system / "cg"]


@pytest.mark.parametrize(
    "quota, most", [("max 100000", 10**6), ("50000 100000", 1), ("100000 100000", 1), ("150000 100000", 2), ("", 10**6)]
)
def test_processors_are_the_smaller_of_affinity_and_quota(system: Path, quota: str, most: int) -> None:
    write(system / "cg/pod/cpu.max", quota)
    assert processors(system) == min(most, len(os.sched_getaffinity(0)))


def test_this_machine_has_something_to_give() -> None:
    assert resources.processors() >= 1
    found = resources.free_memory()
    assert found is not None and found > 1 << 20
