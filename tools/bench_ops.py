"""What a forward pass on the CPU costs beside the matrix products that it cannot avoid: a table and one JSON line.

``python tools/bench_ops.py MODEL.gguf [--threads N] [--rounds N]``. Everything is measured in turn within each round, and the
figure is the median over the rounds, so that a machine shared with others disturbs both sides of a ratio alike. "Bare products" multiply
every weight matrix of the model once, and of experts those that the rows go to by these rows: each thread its own share of all, no handing
over, nothing else, in the fastest way that NumPy has (one row: one matrix-vector product; 8 rows: tiles, or blocks outside and rows inside;
512: one GEMM). The goal for prompts is SmolLM2-135M's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strata.engine.experts import Expert, LayerExperts  # noqa: E402
from strata.engine.families import read_config  # noqa: E402
from strata.engine.forward import StageModel  # noqa: E402
from strata.engine.kv import PAGE_TOKENS, PagedKV  # noqa: E402
from strata.engine.numpy_ops import NumpyOps  # noqa: E402
from strata.engine.products import Matrix, cuts  # noqa: E402
from strata.engine.rows import wanted_rows  # noqa: E402
from strata.engine.threads import Threads  # noqa: E402
from strata.engine.tiles import multiply, tiles_for  # noqa: E402
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


@dataclass(frozen=True)
class Product:
    """A matrix and how many rows a window sends through it: ``weights`` [rows, columns], and the same in ``blocks``, padded."""

    weights: NDArray[np.float32]
    blocks: NDArray[np.float32]
    rows: int


def products(model: StageModel, window: Window) -> list[Product]:
    """Every product that ``window`` needs; of experts, those that its rows go to."""
    rows = sum(len(segment.tokens) for segment in window.segments)
    whole: list[Matrix] = []
    for layer in model.layers:
        whole += [layer.qkv, layer.attn_output]
        whole += [layer.dense.gate_up, layer.dense.down] if layer.dense else []
        whole += [layer.routed.router] if layer.routed else []
    found = [Product(matrix.weights, matrix.blocks, rows) for matrix in whole]
    for expert, count in routed(model, window):
        for blocks, height in ((expert.gate_up, 2 * expert.inner), (expert.down, expert.width)):
            found.append(Product(blocks.reshape(-1, blocks.shape[3])[:height], blocks, count))
    return [*found, Product(model.output.weights, model.output.blocks, len(wanted_rows(window)))]


def routed(model: StageModel, window: Window) -> list[tuple[Expert, int]]:
    """The experts that the rows of ``window`` go to, block by block, and how many rows each gets."""
    mixture, seen = model.ops.mixture, []
    plain = mixture.mix

    def watched(x: Any, chosen: Any, weights: Any, layer: LayerExperts) -> Any:
        for expert, count in zip(*np.unique(chosen, return_counts=True)):
            seen.append((next(mixture.store.lots(layer, [int(expert)]))[0], int(count)))
        return plain(x, chosen, weights, layer)

    with patch.object(mixture, "mix", watched):
        model.forward(window, None)
    return seen


def bare_row(threads: Threads, needed: list[Product]) -> Callable[[], None]:
    """All products of one row."""
    jobs = [(each.weights, np.ones(each.weights.shape[1], np.float32), np.empty(len(each.weights), np.float32)) for each in needed]

    def work(index: int) -> None:
        for weights, x, out in jobs:
            mine = cuts(len(weights), threads.count)[index]
            np.dot(weights[mine], x, out[mine])

    return lambda: threads.run(work)


def bare_rows(threads: Threads, needed: list[Product]) -> Callable[[], None]:
    """All products of a few rows, whose bits depend on no other row: by tiles where BLAS has kernels for them, else block by block."""
    jobs: list[tuple[list[slice], Callable[[slice], object]]] = []
    for each in needed:
        count, _, block, columns = each.blocks.shape
        tiles, shares = tiles_for(columns), cuts(count, threads.count)
        x, out = np.ones((each.rows, columns), np.float32), np.empty((each.rows, count * block), np.float32)
        if tiles is not None:
            weights = each.blocks[:, 0].swapaxes(1, 2)
            jobs.append((shares, lambda mine, x=x, weights=weights, most=tiles.rows, out=out, block=block: multiply(
                x, weights[mine], most, out[:, mine.start * block : mine.stop * block]
            )))
        else:
            result = out.reshape(count, each.rows, block, 1)
            jobs.append((shares, lambda mine, x=x[None, :, :, None], blocks=each.blocks, out=result: np.matmul(
                blocks[mine], x, out=out[mine], order="C"
            )))

    def work(index: int) -> None:
        for shares, job in jobs:
            if index < len(shares):
                job(shares[index])

    return lambda: threads.run(work)


def bare_gemm(threads: Threads, needed: list[Product], few: bool = False) -> Callable[[], None]:
    """All products, by one GEMM for each thread and matrix; with ``few``, in the orientation that suits few rows."""
    jobs = []
    for each in needed:
        x, shape = np.ones((each.rows, each.weights.shape[1]), np.float32), (len(each.weights), each.rows)
        jobs.append((each.weights, x, np.empty(shape, np.float32) if few else np.empty(shape[::-1], np.float32).T))

    def work(index: int) -> None:
        for weights, x, out in jobs:
            mine = cuts(len(weights), threads.count)[index]
            if few:
                np.matmul(weights[mine], x.T, out=out[mine])
            else:
                np.matmul(x, weights[mine].T, out=out[mine].T)

    return lambda: threads.run(work)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(model: StageModel, rounds: int) -> dict[str, float]:
    prompt, one, eight = prompt_window(PROMPT), decode_window(1), decode_window(SLOTS)
    for slot in range(SLOTS):
        model.forward(prompt_window(CONTEXT, slot), None)
    threads, of_one, of_eight, of_prompt = model.ops.threads, products(model, one), products(model, eight), products(model, prompt)[:-1]
    works: dict[str, Callable[[], object]] = {
        "bare_1": bare_row(threads, of_one),
        "decode_1": lambda: model.forward(one, None),
        "bare_8": bare_rows(threads, of_eight),
        "decode_8": lambda: model.forward(eight, None),
        "gemm_8": bare_gemm(threads, of_eight, few=True),
        "gemm": bare_gemm(threads, of_prompt),
        "prompt": lambda: model.forward(prompt, None),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            for _ in range(1 if name in ("gemm", "prompt") else 4):
                times[name].append(timed(work))
    return figures(times, flops=sum(2.0 * each.rows * each.weights.size for each in of_prompt))


def figures(times: dict[str, list[float]], flops: float) -> dict[str, float]:
    """``flops``: floating-point operations of a prompt's products."""
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
        "prompt_to_gemm": middle["prompt"] / middle["gemm"],
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
