"""Which BLAS takes row products by tiles, how rows and tiles are shared out, and that one whose bits depend on the rows is found out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine import tiles
from strata.engine.tiles import FEWEST, MOST_PRODUCTS, MOST_RESULTS, Tiles, has_small_kernels, keeps_rows_apart, lots, tile_cuts, tiles_for


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """What is remembered of the BLAS is forgotten before and after."""
    for _ in range(2):
        tiles_for.cache_clear()
        has_small_kernels.cache_clear()
        if _ == 0:
            yield


@pytest.mark.parametrize("columns", [8, 64, 576, 1536, 4096, 11008, 28672, 40_000])
def test_products_stay_within_what_the_kernels_take(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "has_small_kernels", lambda: True)
    monkeypatch.setattr(tiles, "keeps_rows_apart", lambda columns, tiles: True)
    found = tiles_for(columns)
    assert found is not None and found.rows >= FEWEST
    assert found.rows * found.size <= MOST_RESULTS and found.rows * found.size * columns <= MOST_PRODUCTS


def test_wide_matrices_and_other_processors_go_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "has_small_kernels", lambda: True)
    assert tiles_for(60_000) is None
    monkeypatch.setattr(tiles, "has_small_kernels", lambda: False)
    assert tiles_for(64) is None


def test_a_blas_whose_bits_depend_on_the_rows_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "matmul", lambda a, b: np.ones((len(b), len(a), b.shape[2])) * a[:, :1])
    assert keeps_rows_apart(16, Tiles(8, 12))
    for bad in (2, 7, 12):
        monkeypatch.setattr(np, "matmul", lambda a, b, bad=bad: np.ones((len(b), len(a), b.shape[2])) * a[:, :1] + (len(a) == bad))
        assert not keeps_rows_apart(16, Tiles(8, 12))
    monkeypatch.setattr(np, "matmul", lambda a, b: np.ones((len(b), len(a), b.shape[2])) * a[:, :1] + np.arange(len(a))[:, None])
    assert not keeps_rows_apart(16, Tiles(8, 12)), "by place"


@given(st.integers(1, 600), st.integers(FEWEST, 40))
def test_lots_cover_all_rows_and_none_is_a_single_one(rows: int, most: int) -> None:
    found = lots(rows, most)
    assert [row for lot in found for row in range(lot.start, lot.stop)] == list(range(rows))
    assert all(min(2, rows) <= lot.stop - lot.start <= most for lot in found)


@given(st.integers(1, 200), st.sampled_from([8, 16, 32]), st.integers(1, 8), st.integers(2, 40), st.integers(0, 400))
def test_pieces_cover_all_tiles(count: int, size: int, pieces: int, beside: int, lead: int) -> None:
    found = tile_cuts(count, size, pieces, beside, lead)
    assert [tile for cut in found for tile in range(cut.start, cut.stop)] == list(range(count))
    assert 1 <= len(found) <= pieces and all(cut.start < cut.stop for cut in found)
