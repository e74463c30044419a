"""Runs small models through the stages of the engine, as the pipeline would, for the tests of the forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.engine.families import read_config
from strata.engine.forward import StageModel
from strata.engine.kv import KVKind, PagedKV
from strata.engine.numpy_ops import NumpyOps
from strata.messages import Segment, Window
from strata.request import Sampling
from strata.weights.gguf import GGUFFile

DATA = Path(__file__).parent.parent / "data"
TINY = DATA / "tiny" / "llama-iq3s.gguf"
MOE = [DATA / "tiny" / f"{name}-iq3s.gguf" for name in ("qwen3moe", "glm4moe", "glm4moe-accept-all", "glm4moe-accept-some")]
GOLDEN = sorted((DATA / "golden").glob("*.gguf"))
Floats = NDArray[np.float32]


class Stages:
    """A model in one or more stages; ``splits`` are the layers at which a new stage begins. Use ``with``."""

    def __init__(self, path: Path, ops: NumpyOps, splits: tuple[int, ...] = (), kind: KVKind = "f32", num_pages: int = 48) -> None:
        self.ops = ops
        self.file = GGUFFile.open(path)
        self.config = config = read_config(self.file)
        edges = [0, *splits, config.num_layers]
        spans = [range(start, stop) for start, stop in zip(edges[:-1], edges[1:], strict=True)]
        self.models = [StageModel(self.file, config, span, ops, PagedKV(config, len(span), num_pages, kind=kind)) for span in spans]

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self.ops.close()
        self.file.close()

    def run(self, window: Window) -> Floats:
        data = None
        for model in self.models:
            data = model.forward(window, data)
        assert data is not None
        return data

    def read(self, tokens: tuple[int, ...], pages: tuple[int, ...], start: int = 0, chunk: int = 1 << 20) -> Floats:
        """Read ``tokens`` from position ``start`` on in chunks that end on the grid; the logits of all rows."""
        out, position, end = [], start, start + len(tokens)
        while position < end:
            stop = min(end, (position + chunk) // chunk * chunk)
            out.append(self.run(Window(0, "prompt", 0, (segment(tokens[position - start : stop - start], pages, position, every=True),))))
            position = stop
        return np.concatenate(out)

    def step(self, *rows: tuple[int, int, tuple[int, ...]]) -> Floats:
        """One decode window; each row is (token, position, pages)."""
        segments = tuple(segment((token,), pages, position, slot) for slot, (token, position, pages) in enumerate(rows))
        return self.run(Window(0, "decode", 0, segments))


def segment(tokens: tuple[int, ...], pages: tuple[int, ...], start: int, slot: int = 0, every: bool = False) -> Segment:
    return Segment(f"r{slot}", slot, start, tokens, pages, Sampling(), prompt_logprobs=0 if every else -1)


def ids(array: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(int(token) for token in array)


def random_ids(count: int, seed: int = 0) -> tuple[int, ...]:
    return ids(np.random.default_rng(seed).integers(3, 500, count))


def pages_for(count: int, seed: int = 0, first: int = 0) -> tuple[int, ...]:
    """``count`` page ids in a random order, from ``first`` on: no two alike, hardly two in a row."""
    return ids(first + np.random.default_rng(seed).permutation(count))


def rms(difference: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(difference.astype(np.float64)))))
