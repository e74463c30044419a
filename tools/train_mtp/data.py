"""The texts that were written so far, read shard by shard while more are being written."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """``tokens`` int64, ``learn`` bool [texts, length]; ``hidden`` float32 [.., width]. learn[m]: token m + 1 is to be foreseen."""

    tokens: Tensor
    learn: Tensor
    hidden: Tensor


class Stream:
    """Batches of ``size`` texts without end: the least read shards first, each at most ``passes`` times, then it waits for new ones."""

    def __init__(self, folder: Path, size: int, passes: int, seed: int) -> None:
        self.folder, self.size, self.passes = folder, size, passes
        self.draw = random.Random(seed)
        self.reads: dict[Path, int] = {}

    def __iter__(self) -> Iterator[Batch]:
        while True:
            part = np.load(self._next_shard())
            tokens, learn, hidden = part["tokens"], part["learn"], part["hidden"]
            order = list(range(len(tokens)))
            self.draw.shuffle(order)
            for start in range(0, len(order) - self.size + 1, self.size):
                rows = order[start : start + self.size]
                yield Batch(torch.from_numpy(tokens[rows]).long(), torch.from_numpy(learn[rows]), torch.from_numpy(hidden[rows]).float())

    def _next_shard(self) -> Path:
        waits = False
        while True:
            for path in self.folder.glob("text-*.npz"):
                self.reads.setdefault(path, 0)
            ready = sorted(path for path, reads in self.reads.items() if reads < self.passes)
            if ready:
                fewest = min(self.reads[path] for path in ready)
                chosen = self.draw.choice([path for path in ready if self.reads[path] == fewest])
                self.reads[chosen] += 1
                return chosen
            if not waits:
                print(f"every text in {self.folder} was read {self.passes} times, or there is none: waiting for more", flush=True)
                waits = True
            time.sleep(1)


def frequent(folder: Path, count: int, fallback: np.ndarray) -> np.ndarray:
    """int32 [count]: the ids most frequent among the tokens written so far, then those of ``fallback`` that were not written."""
    totals: np.ndarray = np.zeros(int(fallback.max()) + 1, np.int64)
    for path in sorted(folder.glob("text-*.npz")):
        part = np.load(path)
        written = np.zeros_like(part["learn"])
        written[:, 1:] = part["learn"][:, :-1]
        seen = np.bincount(part["tokens"][written])
        totals = np.pad(totals, (0, max(len(seen) - len(totals), 0)))
        totals[: len(seen)] += seen
    order = np.argsort(-totals, kind="stable")
    known = order[totals[order] > 0]
    rest = fallback[~np.isin(fallback, known)]
    return np.concatenate([known, rest])[:count].astype(np.int32)
