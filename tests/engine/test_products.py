"""Both kinds of product against float64, for awkward shapes; threads raise what their work raises."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from strata.engine import products
from strata.engine.products import Arena, Matrix, RowFrame, block_rows, cuts, grid_product, grouped_product
from strata.engine.threads import Threads
from strata.engine.tiles import Tiles, has_small_kernels, padded


def random_matrix(rows: int, columns: int) -> Matrix:
    matrix = Matrix(rows, columns, None, 3, Arena())
    matrix.weights[:] = np.random.default_rng(rows).standard_normal((rows, columns))
    return matrix


@pytest.fixture(params=["tiles", "blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of row products, whatever this machine would take."""
    by_tiles = request.param == "tiles"
    monkeypatch.setattr(products, "tiles_for", lambda columns: Tiles(8, 16) if by_tiles else None)
    if by_tiles and not has_small_kernels():
        pytest.skip("this BLAS has no kernels for small matrices")
    return str(request.param)


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (7, 33), (100, 16), (576, 576), (1000, 40), (1187, 128)])
@pytest.mark.parametrize("kind", ["rows", "grid"])
@pytest.mark.parametrize("count", [1, 3])
def test_products(rows: int, columns: int, kind: str, count: int, way: str) -> None:
    matrix = random_matrix(rows, columns)
    x = np.random.default_rng(0).standard_normal((256, columns)).astype(np.float32)
    out = np.full((256, matrix.padded_rows), np.nan, np.float32)
    threads = Threads(count)
    if kind == "rows":
        frame = RowFrame(matrix, len(x))
        threads.run(*frame.product(x, matrix))
        out[:] = frame.out
    else:
        threads.run(*grid_product(x, matrix, out, count))
    threads.close()
    expected = x.astype(np.float64) @ matrix.weights.astype(np.float64).T
    np.testing.assert_allclose(out[:, :rows], expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 96, 100, 576, 960, 1187, 3072, 49152, 151936, 32001])
@pytest.mark.parametrize("columns", [16, 576, 1536, 4096, 28672])
def test_blocks_cover_the_rows_with_little_padding(rows: int, columns: int) -> None:
    block = block_rows(rows, columns)
    assert block % 8 == 0
    assert -rows % block <= max(7, rows // 8)


@pytest.mark.parametrize("shape", [(1000, 600), (576, 1536), (40, 100)])
def test_a_row_has_the_same_bits_beside_any_number_of_rows(shape: tuple[int, int], way: str) -> None:
    """1,000 rows of 600 are enough to be shared among threads in other pieces than blocks, where BLAS allows that."""
    matrix = random_matrix(*shape)
    x = np.random.default_rng(1).standard_normal((40, shape[1])).astype(np.float32)
    threads = Threads(3)
    matrix.verify()
    found = [np.array(product(threads, matrix, x[row : row + 1])) for row in range(40)]
    for count in (2, 3, 5, 8, 16, 17, 31, 33, 40):
        rows = np.random.default_rng(count).permutation(40)[:count]
        together = product(threads, matrix, x[rows])
        for place, row in enumerate(rows):
            np.testing.assert_array_equal(together[place], found[row][0])
    threads.close()


def product(threads: Threads, matrix: Matrix, x: np.ndarray) -> np.ndarray:
    frame = RowFrame(matrix, len(x))
    threads.run(*frame.product(x, matrix))
    return frame.out


@pytest.mark.parametrize("counts", [(1, 2, 5), (1,), (20, 1), (1,) * 12])
def test_groups_of_rows_have_the_bits_of_rows_alone(counts: tuple[int, ...], way: str) -> None:
    matrices = [random_matrix(96 + number, 64) for number in range(len(counts))]
    size = max(matrix.padded_rows for matrix in matrices)
    matrices = [random_matrix(size, 64) for _ in counts]
    x = np.random.default_rng(1).standard_normal((sum(counts), 64)).astype(np.float32)
    edges = np.cumsum((0, *counts)).tolist()
    out = np.empty((len(x), size), np.float32)
    threads = Threads(2)
    groups = [(slice(*pair), matrix.blocks) for pair, matrix in zip(zip(edges, edges[1:]), matrices)]
    threads.run(*grouped_product(x, groups, out, 2))
    for rows, matrix in zip((group[0] for group in groups), matrices):
        for row in range(rows.start, rows.stop):
            np.testing.assert_array_equal(out[row], product(threads, matrix, x[row : row + 1])[0])
    threads.close()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
def test_blocks_at_once_have_the_bits_of_blocks_one_by_one(size: int) -> None:
    matrix = random_matrix(200, 96)
    x = np.random.default_rng(1).standard_normal((size * 128, 96)).astype(np.float32)
    results = []
    for verified in (False, True):
        if verified:
            matrix.verify()
        out = np.empty((len(x), matrix.padded_rows), np.float32)
        work, pieces = grid_product(x, matrix, out, 1)
        for piece in range(pieces):
            work(piece)
        results.append(out[:, :200])
    np.testing.assert_array_equal(results[0], results[1])


def test_a_blas_whose_bits_depend_on_the_size_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_matrix(200, 96)
    matrix.verify()
    whole = (matrix.row_at_once, matrix.grid_at_once)
    dot, matmul = np.dot, np.matmul
    monkeypatch.setattr(np, "dot", lambda a, b: dot(a, b) * np.float32(1 + 1e-6))
    monkeypatch.setattr(np, "matmul", lambda a, b, **more: matmul(a, b, **more) * np.float32(1 + 1e-6 * (len(a) == 256)))
    matrix.verify()
    assert (matrix.row_at_once, matrix.grid_at_once) == (False, False) != whole


@pytest.mark.parametrize(("items", "pieces"), [(1, 0), (1, 5), (8, 3), (5, 5), (100, 7)])
def test_cuts_cover_everything_once(items: int, pieces: int) -> None:
    slices = cuts(items, pieces)
    assert [index for cut in slices for index in range(cut.start, cut.stop)] == list(range(items))
    assert 1 <= len(slices) <= max(1, pieces)


@pytest.mark.parametrize("pieces", [1, 2, 3, 40])
def test_every_piece_is_done_once(pieces: int) -> None:
    threads = Threads(3)
    seen: list[int] = []
    threads.run(seen.append, pieces)
    threads.close()
    assert sorted(seen) == list(range(pieces))


@pytest.mark.parametrize("bad", [0, 7, 19])
def test_an_error_reaches_the_caller_and_the_threads_live_on(bad: int) -> None:
    threads = Threads(3)

    def fail(piece: int) -> None:
        if piece == bad:
            raise RuntimeError(f"in piece {piece}")

    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"in piece {bad}"):
            threads.run(fail, 20)
    seen: list[int] = []
    threads.run(seen.append)
    assert sorted(seen) == [0, 1, 2]
    threads.close()


def test_close_ends_the_threads_and_gives_blas_its_own_back() -> None:
    def blas() -> list[int]:
        return [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"]

    before, others = blas(), threading.enumerate()
    first, second = Threads(2), Threads(2)
    workers = [thread for thread in threading.enumerate() if thread not in others]
    assert len(workers) == 2
    assert set(blas()) == {1}
    first.close()
    first.close()
    assert set(blas()) == {1}
    second.close()
    assert blas() == before
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()


def test_rows_that_are_dear_go_with_one_more() -> None:
    assert [padded(rows) for rows in range(1, 10)] == [2, 2, 4, 4, 5, 6, 8, 8, 9]
