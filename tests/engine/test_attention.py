"""Attention over pages against a plain softmax in float64, for grouped heads, odd page orders and both kinds of part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.engine import numpy_ops
from strata.engine.kv import PagedKV
from strata.engine.numpy_ops import NumpyOps
from strata.engine.rows import GridPart, RowPart
from strata.messages import Segment, Window
from strata.request import Sampling

HEADS, KV_HEADS, DIM = 6, 2, 8
CONFIG: Any = SimpleNamespace(num_kv_heads=KV_HEADS, head_dim=DIM)


def cache(kind: Any, segments: tuple[Segment, ...], seed: int = 0) -> tuple[PagedKV, dict[int, np.ndarray]]:
    """A cache with random keys and values of every slot, up to its segment's end; and what it holds, per slot [2, tokens, heads, dim]."""
    kv = PagedKV(CONFIG, 1, 40, kind=kind)
    kv.clear(np.arange(40))
    held = {}
    for segment in segments:
        rows = np.random.default_rng(seed + segment.slot).standard_normal((segment.end, 2, KV_HEADS, DIM)).astype(np.float32)
        positions = np.arange(segment.end)
        kv.write(0, np.array(segment.pages)[positions // 64], positions % 64, rows)
        heads = [[kv.head(0, which, np.array(segment.pages), head) for head in range(KV_HEADS)] for which in (0, 1)]
        held[segment.slot] = np.array(heads).swapaxes(1, 2)[:, : segment.end]
    return kv, held


def plain(query: np.ndarray, held: np.ndarray, position: int) -> np.ndarray:
    keys, values = held[:, : position + 1].astype(np.float64).repeat(HEADS // KV_HEADS, axis=2)
    scores = np.einsum("hd,thd->ht", query.astype(np.float64), keys) / np.sqrt(DIM)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values).ravel()


def check(window: Window, kind: Any, threads: int, grid: bool) -> tuple[type, ...]:
    kv, held = cache(kind, window.segments)
    ops = NumpyOps(threads, deterministic=not grid)
    with ops.window(window, kv, HEADS // KV_HEADS) as plan:
        layout = plan.layout
        queries = 3 * np.random.default_rng(9).standard_normal((len(layout.tokens), HEADS, DIM)).astype(np.float32)
        out = ops.attention(queries, 0, plan)[layout.real]
    ops.close()
    owners = [(segment.slot, position) for segment in window.segments for position in range(segment.start, segment.end)]
    expected = [plain(queries[row], held[slot], position) for row, (slot, position) in zip(layout.real, owners, strict=True)]
    np.testing.assert_allclose(out, expected, atol=1e-5, rtol=0)
    return tuple(type(part) for part in layout.parts)


@pytest.mark.parametrize("kind", ["f32", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_decode_rows_of_several_slots(kind: Any, threads: int) -> None:
    ends = {0: 1, 1: 64, 2: 65, 3: 300, 4: 640}
    tables = {0: (39,), 1: (7,), 2: (9, 8), 3: (1, 2, 3, 0, 4), 4: tuple(range(30, 20, -1))}
    segments = tuple(Segment("r", slot, end - 1, (1,), tables[slot], Sampling()) for slot, end in ends.items())
    assert check(Window(0, "decode", 0, segments), kind, threads, True) == (RowPart,)


@pytest.mark.parametrize("kind", ["f32", "int8"])
@pytest.mark.parametrize(
    ("start", "end", "parts"),
    [
        (0, 700, (GridPart,)),
        (100, 700, (RowPart, GridPart)),
        (30, 650, (GridPart, RowPart)),
        (580, 680, (GridPart, RowPart)),
        (600, 680, (RowPart,)),
        (3, 40, (RowPart,)),
    ],
)
def test_prompt_rows(kind: Any, start: int, end: int, parts: tuple[type, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_ops, "short_rows", lambda: 48)
    pages = tuple(int(page) for page in np.random.default_rng(4).permutation(40)[:11])
    window = Window(0, "prompt", 0, (Segment("r", 0, start, (1,) * (end - start), pages),))
    assert check(window, kind, 2, True) == parts
    assert check(window, kind, 2, False) == (RowPart,)
