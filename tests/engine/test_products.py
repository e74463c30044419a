"""Both kinds of product against float64, for awkward shapes; threads raise what their work raises."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from strata.engine.products import Arena, Matrix, RowFrame, block_rows, cuts, grid_product
from strata.engine.threads import Threads


def random_matrix(rows: int, columns: int) -> Matrix:
    matrix = Matrix(rows, columns, None, 3, Arena())
    matrix.weights[:] = np.random.default_rng(rows).standard_normal((rows, columns))
    return matrix


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (7, 33), (100, 16), (576, 576), (1000, 40), (1187, 128)])
@pytest.mark.parametrize("kind", ["rows", "grid"])
@pytest.mark.parametrize("count", [1, 3])
def test_products(rows: int, columns: int, kind: str, count: int) -> None:
    matrix = random_matrix(rows, columns)
    x = np.random.default_rng(0).standard_normal((256, columns)).astype(np.float32)
    out = np.full((256, matrix.padded_rows), np.nan, np.float32)
    threads = Threads(count)
    if kind == "rows":
        threads.run(*RowFrame(matrix, out).product(x, matrix))
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


def test_one_row_alone_has_the_bits_of_one_among_many() -> None:
    """1,000 rows of 600 are enough to be shared among threads in other pieces than blocks, where BLAS allows that."""
    matrix = random_matrix(1000, 600)
    x = np.random.default_rng(1).standard_normal((4, 600)).astype(np.float32)
    threads = Threads(3)
    many = np.empty((4, matrix.padded_rows), np.float32)
    threads.run(*RowFrame(matrix, many).product(x, matrix))
    matrix.verify()
    alone = np.empty((1, matrix.padded_rows), np.float32)
    for row in range(4):
        threads.run(*RowFrame(matrix, alone).product(x[row : row + 1], matrix))
        np.testing.assert_array_equal(alone[0], many[row])
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

    before = blas()
    first, second = Threads(2), Threads(2)
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("strata-ops")]
    assert set(blas()) == {1}
    first.close()
    first.close()
    assert set(blas()) == {1}
    second.close()
    assert blas() == before
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
