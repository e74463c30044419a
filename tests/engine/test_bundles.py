"""Rows that share tiles: who sits in which bundle, what each place sees, and that company changes no bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.bundles import bundle_size, in_lots, most_bundled
from strata.engine.kv import PagedKV
from strata.engine.numpy_ops import NumpyOps
from strata.engine.rows import RowPart, Run
from strata.engine.tiles import has_small_kernels
from strata.messages import Segment, Window
from strata.request import Sampling

PAGE = 64


def part_of(*runs: tuple[int, int]) -> RowPart:
    """Runs (position, count), each with pages of its own."""
    made, page = [], 0
    for position, count in runs:
        pages = (position + count - 1) // PAGE + 1
        made.append(Run(position, count, tuple(range(page, page + pages))))
        page += pages
    return RowPart(0, sum(run.count for run in made), tuple(made))


def test_a_row_has_one_tile_for_each_page_of_its_context() -> None:
    part = RowPart(0, 2, (Run(255, 1, (3, 4, 8, 9)), Run(64, 1, (10, 11))))
    (found,) = in_lots(part, 1, 100, PAGE)
    assert (found.pages.tolist(), found.of_tile.tolist()) == ([3, 4, 8, 9, 10, 11], [0, 0, 0, 0, 1, 1])
    assert (found.firsts.tolist(), found.hidden) == ([0, 4], ((5, 0, 1),))


def test_lots_are_cut_between_bundles() -> None:
    """Five rows of 1 to 5 tiles, at most 6 tiles a lot (but a bundle is never cut)."""
    part = part_of(*((PAGE * tiles, 1) for tiles in range(5)))
    lots = list(in_lots(part, 1, 6, PAGE))
    assert [(lot.start, lot.stop, lot.num_tiles) for lot in lots] == [(0, 3, 6), (3, 4, 4), (4, 5, 5)]
    assert [lot.num_tiles for lot in in_lots(part, 1, 2, PAGE)] == [1, 2, 3, 4, 5]
    assert [lot.firsts.tolist() for lot in lots] == [[0, 1, 3], [0], [0]]
    assert [lot.of_tile.tolist() for lot in lots] == [[0, 1, 1, 2, 2, 2], [0] * 4, [0] * 5]


def test_a_bundle_may_cross_a_page() -> None:
    (found,) = in_lots(part_of((62, 4)), 6, 100, PAGE)
    assert (found.size, found.pages.tolist()) == (4, [0, 1])
    assert found.hidden == ((0, 0, 63), (1, 0, 0), (1, 1, 0), (1, 2, 1), (1, 3, 2))


def test_places_too_many_repeat_the_last_row() -> None:
    (found,) = in_lots(part_of((5, 3), (70, 2)), 3, 100, PAGE)
    assert found.rows.tolist() == [[0, 1, 2], [3, 4, 4]]
    assert found.real.tolist() == [[True] * 3, [True, True, False]]


def test_the_size_weighs_reading_against_multiplying() -> None:
    assert bundle_size(part_of((100, 1), (200, 1)).runs, 6) == 1
    assert bundle_size(part_of((100, 4)).runs, 6) == 4
    assert bundle_size(part_of((100, 40)).runs, 6) == 6
    assert bundle_size(part_of((100, 2), *[(500, 1)] * 7).runs, 6) == 1, "seven would be multiplied twice for one"


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 50)), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 30))
def test_every_row_sits_once_and_sees_what_lies_before_it(runs: list[tuple[int, int]], most: int, most_tiles: int) -> None:
    part = part_of(*runs)
    positions = [position + index for position, count in runs for index in range(count)]
    tables = [run.pages for run in part.runs for _ in range(run.count)]
    seen_rows = []
    for lot in in_lots(part, most, most_tiles, PAGE):
        seen_rows += (lot.start + lot.rows[lot.real]).tolist()
        hidden = {(tile, place): seen for tile, place, seen in lot.hidden}
        for number, first in enumerate(lot.firsts.tolist()):
            tiles = [tile for tile in range(lot.num_tiles) if lot.of_tile[tile] == number]
            for place in range(lot.size):
                row = lot.start + lot.rows[number, place]
                visible = [hidden.get((tile, place), PAGE) for tile in tiles]
                assert sum(visible) == positions[row] + 1 and visible == sorted(visible, reverse=True)
                assert tuple(lot.pages[tiles]) == tables[row][: len(tiles)] and tiles[0] == first
    assert seen_rows == list(range(part.stop))


@pytest.mark.parametrize("kind", ["f32", "int8"])
@pytest.mark.parametrize(("group", "dim"), [(3, 64), (2, 8), (4, 32), (1, 64), (8, 128)])
def test_company_changes_no_bit(kind: Any, group: int, dim: int) -> None:
    kv = PagedKV(SimpleNamespace(num_kv_heads=2, head_dim=dim), 1, 24, kind=kind)  # type: ignore[arg-type]
    random = np.random.default_rng(0)
    kv.clear(np.arange(24))
    for page in range(24):
        kv.write(0, np.full(PAGE, page), np.arange(PAGE), random.standard_normal((PAGE, 2, 2, dim)).astype(np.float32))
    tables = [tuple(random.permutation(24)[:5].tolist()) for _ in range(3)]
    rows = [(slot, position) for slot, start in enumerate((61, 200, 130)) for position in range(start, start + 7)]
    queries = {row: random.standard_normal((2 * group, dim)).astype(np.float32) for row in rows}
    ops = NumpyOps(2, deterministic=True)

    def attend(runs: list[tuple[int, int, int]]) -> dict[tuple[int, int], bytes]:
        """(slot, first position, count) each."""
        segments = tuple(Segment("r", slot, start, (1,) * count, tables[slot], Sampling(), count - 1) for slot, start, count in runs)
        asked = [(slot, start + index) for slot, start, count in runs for index in range(count)]
        with ops.window(Window(0, "decode", 0, segments), kv, group) as plan:
            out = ops.attention(np.stack([queries[row] for row in asked]), 0, plan)
        return {row: values.tobytes() for row, values in zip(asked, out)}

    alone = {row: attend([(*row, 1)])[row] for row in rows}
    for runs in ([(0, 61, 7)], [(1, 200, 2), (0, 61, 4), (2, 130, 1)], [(2, 131, 3), (1, 203, 3)]):
        assert all(alone[row] == bits for row, bits in attend(runs).items())
    ops.close()


@pytest.mark.skipif(not has_small_kernels(), reason="this BLAS has no kernels for small matrices")
def test_rows_are_bundled_where_the_kernels_allow_it() -> None:
    assert most_bundled(3, 64, 64) == 6 and most_bundled(1, 64, 64) == 1 and most_bundled(8, 128, 64) == 1


def test_a_blas_whose_bits_depend_on_the_rows_bundles_none(monkeypatch: pytest.MonkeyPatch) -> None:
    most_bundled.cache_clear()
    monkeypatch.setattr("strata.engine.bundles.has_small_kernels", lambda: True)
    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", lambda a, b: matmul(a, b) + np.float32(a.shape[1] == 12))
    assert most_bundled(3, 64, 64) == 1
    most_bundled.cache_clear()
