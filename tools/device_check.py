"""What this machine's GPU does with the kernels: checked and measured in one run of some minutes, a table and one JSON line.

    python tools/device_check.py [--device cuda|emulated] [--gpu 0] [--no-tests]

Compiles every kernel, runs all kernel tests (each row's bits alone and in company among them) on the GPU, then measures: products in three
layouts against the bandwidth of a copy, attention over int8 and f16 pages up to 262,144 tokens, the cost of a launch and of a graph, an
8B-shaped IQ3_S model decoding 1 and 8 rows against the time that reading its weights takes, and two stages on one card. Without a GPU it
says so and exits 0;
``--device emulated`` runs the same on the processors in tiny sizes, whose times mean nothing. Exits 1 where a check fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from _device_measure import Meter, Sizes, attention_rates, copy_bandwidth, launch_cost, matvec_rates  # noqa: E402
from _device_model import Decoding, ModelShape, bytes_per_window, random_weights, stages_of  # noqa: E402
from lint_kernels import instances  # noqa: E402

from strata.devices.base import Device, DeviceError, KernelName  # noqa: E402
from strata.devices.cuda import CudaDevice  # noqa: E402
from strata.devices.emulated import EmulatedDevice  # noqa: E402
from strata.engine.device_stage import StageWeights  # noqa: E402
from strata.engine.graphs import NODE_BYTES  # noqa: E402
from strata.errors import StartError  # noqa: E402

LIMIT_S = 480.0
TEST_PACKAGES = ("pytest", "hypothesis")  # what tests/kernels and tests/cuda need beside the server's own


@dataclass(frozen=True)
class Plan:
    """What is run. ``tests``: paths; ``slots`` of the batched run, ``steps`` of each."""

    sizes: Sizes
    model: ModelShape
    slots: int
    steps: int
    compile: bool
    tests: tuple[str, ...]


FULL = Plan(
    Sizes(1 << 30, (14336, 4096), 1 << 29, (4096, 40960, 262144), (32, 8, 128), 256, 0.05),
    ModelShape(32, 4096, 14336, 32, 8, 128, 128256), 8, 60, True, ("tests/kernels", "tests/cuda"),
)  # fmt: skip
TINY = Plan(
    Sizes(1 << 16, (32, 256), 1 << 12, (64, 300), (4, 2, 64), 4, 0.0),
    ModelShape(2, 256, 512, 4, 2, 64, 320), 2, 3, False, ("tests/kernels/test_add.py",),
)  # fmt: skip


class Check:
    """Runs the parts one after the other; ``report`` is what the JSON line says."""

    def __init__(self, device: Device, plan: Plan, deadline: float) -> None:
        self.device, self.plan, self.deadline = device, plan, deadline
        self.report: dict[str, Any] = {}
        self.failed: list[str] = []

    def part(self, name: str, work: Callable[[], Any]) -> None:
        """``work`` gives a part's figures; what it raises is a failure. A part that would begin too late is left out, and said."""
        if time.monotonic() > self.deadline:
            self.report[name] = "left out: no time"
            return
        started = time.monotonic()
        try:
            self.report[name] = work()
        except Exception as error:  # whatever it is, the other parts and the table are worth having
            self.report[name] = f"failed: {type(error).__name__}: {error}"
            self.failed.append(name)
        print(f"{name} took {time.monotonic() - started:.1f} s", flush=True)

    def compile(self) -> dict[str, float]:
        names = [KernelName(stem, entry) for stem, entries in instances().items() for entry in entries]
        return {"kernels": len(names), "seconds": round(self.device.compile(names), 1)}

    def tests(self) -> dict[str, int] | str:
        """pytest's counts, the kernels run by this device."""
        missing = [name for name in TEST_PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            return f"left out: no {' and no '.join(missing)} here (setup.cfg, extra test)"
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            device = "cuda" if self.device.info.arch else "emulated"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *self.plan.tests]
            timeout = max(30.0, self.deadline - time.monotonic())
            environment = {**os.environ, "STRATA_TEST_DEVICE": device}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
            if not report.is_file():
                raise RuntimeError(f"pytest did not run: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
            suite = next(ElementTree.parse(report).iter("testsuite"))
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        if counts["failures"] or counts["errors"]:
            self.failed.append("tests")
            print(done.stdout[-8000:])
        return counts

    def measure(self) -> None:
        meter = Meter(self.device, self.plan.sizes)
        self.part("copy_gb_s", lambda: round(copy_bandwidth(meter) / 1e9, 1))
        bandwidth = 1e9 * self.report["copy_gb_s"] if isinstance(self.report["copy_gb_s"], float) else float("inf")
        self.part("matvec", lambda: matvec_rates(meter, bandwidth))
        self.part("attention", lambda: attention_rates(meter, bandwidth))
        self.part("launch", lambda: launch_cost(meter))
        self.part("model_4bit", lambda: self.model(False, bandwidth))
        self.part("model_packed", lambda: self.model(True, bandwidth))

    def model(self, packed: bool, bandwidth: float) -> dict[str, Any]:
        """Decoding of a random model, as many layers as fit: one row, every slot, two stages in one and in two groups."""
        shape, slots = self.plan.model, self.plan.slots
        layers = min(shape.layers, self.layers_that_fit())
        started, stream = time.monotonic(), self.device.stream()
        weights = random_weights(shape, layers, self.device, stream, packed)
        size, tokens = bytes_per_window(weights), dict[str, dict[int, list[int]]]()
        figures: dict[str, Any] = {"layers": layers, "load_s": round(time.monotonic() - started, 1), "weights_mb": size // 1_000_000}
        runs: dict[str, tuple[int, tuple[int, ...], int]] = {"rows_1": (1, (), 1), f"rows_{slots}": (slots, (), 1)}
        runs |= {"two_stages": (slots, (layers // 2,), 1), "two_stages_two_groups": (slots, (layers // 2,), 2)}
        for name, (rows, cuts, groups) in runs.items():
            figures[name], tokens[name] = self.decode(weights, rows, cuts, groups)
            figures[name]["share"] = round(groups * size / (1e-3 * figures[name]["ms"]) / bandwidth, 3)
        figures["equal"] = all(tokens[name][0] == tokens["rows_1"][0] for name in tokens) and all(
            tokens[name] == tokens[f"rows_{slots}"] for name in ("two_stages", "two_stages_two_groups")
        )
        if not figures["equal"]:
            raise ValueError(f"tokens differ between one row, {slots} rows and two stages: {tokens}")
        return figures

    def decode(self, weights: StageWeights, rows: int, cuts: tuple[int, ...], groups: int) -> tuple[dict[str, float], dict[int, list[int]]]:
        """One run's figures and each slot's tokens. ``memory_mb``: of pages, work space and graphs; they are given back."""
        free = self.device.memory().free
        decoding = Decoding(stages_of(self.plan.model, weights, cuts, rows, self.device), rows, groups)
        decoding.run(2)  # captures the graphs
        took = decoding.run(self.plan.steps)
        decoding.close()
        used = (free - self.device.memory().free) // 1_000_000
        return {"ms": round(1e3 * took, 3), "tokens_s": round(rows / took, 1), "memory_mb": used}, decoding.tokens

    def layers_that_fit(self) -> int:
        """Layers of the model in half of the free memory, at a byte a weight (nibbles need 0.54)."""
        shape = self.plan.model
        layer = shape.width * (shape.heads + shape.kv_heads) * 2 * shape.head_dim + 3 * shape.width * shape.ffn
        return max(2, (self.device.memory().free // 2 - 2 * shape.vocab * shape.width) // layer)


def table(report: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = ["| measured | what | time | rate | share of the copy's bandwidth |", "|---|---|---|---|---|"]
    lines.append(f"| copy | within the device, read and written | | {report.get('copy_gb_s')} GB/s | |")
    for name, key in (("matvec", "layout"), ("attention", "context")):
        for one in report.get(name, []) if isinstance(report.get(name), list) else ():
            what = f"{one[key]}, {one['rows']} rows" if "rows" in one else f"{one[key]} tokens, {one['kv']}"
            lines.append(f"| {name} | {what} | {one['us']} us | {one['gb_s']} GB/s | {100 * one['share']:.0f} % |")
    for name, cost in report["launch"].items() if isinstance(report.get("launch"), dict) else ():
        lines.append(f"| launch | {name.removesuffix('_us')} | {cost} us | | |")
    for name in ("model_4bit", "model_packed"):
        for run, one in report[name].items() if isinstance(report.get(name), dict) else ():
            if isinstance(one, dict):
                lines.append(f"| {name} | {run} | {one['ms']} ms | {one['tokens_s']} tokens/s | {100 * one['share']:.0f} % |")
    return "\n".join(lines)


def open_device(kind: str, number: int) -> Device:
    """Raises StartError or DeviceError where there is none."""
    return cast(Device, CudaDevice(number) if kind == "cuda" else EmulatedDevice())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--gpu", type=int, default=0, help="which of the visible GPUs")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    options = parser.parse_args(arguments)
    try:
        device = open_device(options.device, options.gpu)
    except (StartError, DeviceError) as error:
        print(f"nothing was checked: {error}")
        print(json.dumps({"device": None, "reason": str(error)}))
        return 0
    plan, started = FULL if options.device == "cuda" else TINY, time.monotonic()
    info = device.info
    print(f"{info.name} {info.pci_id} sm_{info.arch}, {info.total_memory / 2**30:.1f} GiB", flush=True)
    check = Check(device, plan, started + LIMIT_S)
    if plan.compile:
        check.part("compile", check.compile)
    check.measure()
    if not options.no_tests:
        check.part("tests", check.tests)
    print(table(check.report))
    facts = {"device": info.name, "pci": info.pci_id, "arch": info.arch, "node_bytes_planned": NODE_BYTES}
    print(json.dumps({**facts, "seconds": round(time.monotonic() - started, 1), **check.report, "failed": check.failed}))
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
