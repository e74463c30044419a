"""What a forward pass on the CPU costs beside the matrix products that it cannot avoid: a table and one JSON line.

``python tools/bench_ops.py MODEL.gguf [--threads N] [--rounds N]``. Everything is measured in turn within each round, and the
figure is the median over the rounds, so that a machine shared with others disturbs both sides of a ratio alike. "Bare products" multiply
every weight matrix of the model once: each thread its own share of all, no handing over, nothing else, in the fastest way that NumPy
has (one row: one matrix-vector product; 8 rows: blocks outside, rows inside; 512: one GEMM).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strata.engine.families import read_config  # noqa: E402
from strata.engine.forward import StageModel  # noqa: E402
from strata.engine.kv import PAGE_TOKENS, PagedKV  # noqa: E402
from strata.engine.numpy_ops import NumpyOps  # noqa: E402
from strata.engine.products import Matrix, cuts  # noqa: E402
from strata.messages import Segment, Window  # noqa: E402
from strata.request import Sampling  # noqa: E402
from strata.weights.gguf import GGUFFile  # noqa: E402

SLOTS, CONTEXT, PROMPT = 8, 160, 512
PAGES_PER_SLOT = 1 + PROMPT // PAGE_TOKENS


def pages_of(slot: int) -> tuple[int, ...]:
    return tuple(range(slot * PAGES_PER_SLOT, (slot + 1) * PAGES_PER_SLOT))


def decode_window(rows: int) -> Window:
    segments = tuple(Segment(str(slot), slot, CONTEXT - 1, (100 + slot,), pages_of(slot), Sampling()) for slot in range(rows))
    return Window(0, "decode", 0, segments)


def prompt_window(tokens: int, slot: int = 0) -> Window:
    ids = tuple(100 + 7 * index % 400 for index in range(tokens))
    return Window(0, "prompt", 0, (Segment("p", slot, 0, ids, pages_of(slot), Sampling()),))


def matrices(model: StageModel) -> list[Matrix]:
    found = []
    for layer in model.layers:
        found += [layer.qkv, layer.attn_output]
        if layer.dense is not None:
            found += [layer.dense.gate_up, layer.dense.down]
        if layer.routed is not None:
            found.append(layer.routed.router)
    return [*found, model.output]


def bare_row(model: StageModel) -> Callable[[], None]:
    """All matrices times one row."""
    jobs = [(matrix.weights, np.ones(matrix.columns, np.float32), np.empty(matrix.rows, np.float32)) for matrix in matrices(model)]
    threads = model.ops.threads

    def work(index: int) -> None:
        for weights, x, out in jobs:
            mine = cuts(len(weights), threads.count)[index]
            np.dot(weights[mine], x, out[mine])

    return lambda: threads.run(work)


def bare_rows(model: StageModel, rows: int) -> Callable[[], None]:
    """All matrices times ``rows`` rows, by blocked matrix-vector products."""
    jobs = []
    for matrix in matrices(model):
        count, _, block, columns = matrix.blocks.shape
        jobs.append((matrix.blocks, np.ones((1, rows, columns, 1), np.float32), np.empty((count, rows, block, 1), np.float32)))
    threads = model.ops.threads

    def work(index: int) -> None:
        for blocks, x, out in jobs:
            mine = cuts(len(blocks), threads.count)[index]
            np.matmul(blocks[mine], x, out=out[mine], order="C")

    return lambda: threads.run(work)


def bare_rows_gemm(model: StageModel, rows: int) -> Callable[[], None]:
    """All matrices times ``rows`` rows, by one GEMM for each thread and matrix, in the orientation that suits few rows."""
    jobs = []
    for matrix in matrices(model):
        jobs.append((matrix.weights, np.ones((rows, matrix.columns), np.float32), np.empty((matrix.rows, rows), np.float32)))
    threads = model.ops.threads

    def work(index: int) -> None:
        for weights, x, out in jobs:
            mine = cuts(len(weights), threads.count)[index]
            np.matmul(weights[mine], x.T, out=out[mine])

    return lambda: threads.run(work)


def bare_gemm(model: StageModel, rows: int) -> tuple[Callable[[], None], float]:
    """All matrices but the output times ``rows`` rows, by one GEMM for each thread and matrix; and its floating-point operations."""
    jobs = []
    for matrix in matrices(model)[:-1]:
        x = np.ones((rows, matrix.columns), np.float32)
        jobs.append((matrix.weights, x, np.empty((rows, matrix.rows), np.float32)))
    threads = model.ops.threads

    def work(index: int) -> None:
        for weights, x, out in jobs:
            mine = cuts(len(weights), threads.count)[index]
            np.matmul(x, weights[mine].T, out=out[:, mine])

    return lambda: threads.run(work), 2.0 * rows * sum(weights.size for weights, _, _ in jobs)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(model: StageModel, rounds: int) -> dict[str, float]:
    gemm, flops = bare_gemm(model, PROMPT)
    prompt, one, eight = prompt_window(PROMPT), decode_window(1), decode_window(SLOTS)
    works: dict[str, Callable[[], object]] = {
        "bare_1": bare_row(model),
        "decode_1": lambda: model.forward(one, None),
        "bare_8": bare_rows(model, SLOTS),
        "decode_8": lambda: model.forward(eight, None),
        "gemm_8": bare_rows_gemm(model, SLOTS),
        "gemm": gemm,
        "prompt": lambda: model.forward(prompt, None),
    }
    for slot in range(SLOTS):
        model.forward(prompt_window(CONTEXT, slot), None)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            for _ in range(1 if name in ("gemm", "prompt") else 4):
                times[name].append(timed(work))
    middle = {name: statistics.median(values) for name, values in times.items()}
    least = {name: min(values) for name, values in times.items()}
    gflops = flops / middle["gemm"] / 1e9
    return {
        "decode_1_ms": 1e3 * middle["decode_1"],
        "bare_1_ms": 1e3 * middle["bare_1"],
        "ratio_1": middle["decode_1"] / middle["bare_1"],
        "ratio_1_least": least["decode_1"] / least["bare_1"],
        "decode_8_ms": 1e3 * middle["decode_8"],
        "bare_8_ms": 1e3 * middle["bare_8"],
        "ratio_8": middle["decode_8"] / middle["bare_8"],
        "ratio_8_least": least["decode_8"] / least["bare_8"],
        "gemm_8_ms": 1e3 * middle["gemm_8"],
        "ratio_8_to_gemm": middle["decode_8"] / middle["gemm_8"],
        "gemm_gflops": gflops,
        "prompt_tokens_s": PROMPT / middle["prompt"],
        "prompt_to_goal": PROMPT / middle["prompt"] / (485 * gflops / 160),
        "prompt_to_goal_least": PROMPT / least["prompt"] / (485 * flops / least["gemm"] / 160e9),
    }


def load(path: Path, threads: int | None) -> StageModel:
    """The whole model as one stage, with a KV cache for the slots measured. Its file stays open."""
    file = GGUFFile.open(path)
    config = read_config(file)
    kv = PagedKV(config, config.num_layers, SLOTS * PAGES_PER_SLOT)
    return StageModel(file, config, range(config.num_layers), NumpyOps(threads), kv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    start = time.perf_counter()
    model = load(arguments.model, arguments.threads)
    load_s = time.perf_counter() - start
    result = {"load_s": load_s, "threads": float(model.ops.threads.count), **measure(model, arguments.rounds)}
    for name, value in result.items():
        print(f"{name:22} {value:10.3f}")
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
