"""Both kinds of product against float64, for awkward shapes; threads raise what their work raises."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from strata.engine.products import Matrix, block_rows, grid_product, multiply, row_product
from strata.engine.threads import Threads


def random_matrix(rows: int, columns: int) -> Matrix:
    matrix = Matrix(rows, columns)
    matrix.weights[:] = np.random.default_rng(rows).standard_normal((rows, columns))
    return matrix


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (7, 33), (100, 16), (576, 576), (1000, 40), (1187, 128)])
@pytest.mark.parametrize("kind", [row_product, grid_product])
@pytest.mark.parametrize("count", [1, 3])
def test_products(rows: int, columns: int, kind: object, count: int) -> None:
    matrix = random_matrix(rows, columns)
    x = np.random.default_rng(0).standard_normal((256, columns)).astype(np.float32)
    out = np.full((256, matrix.padded_rows), np.nan, np.float32)
    threads = Threads(count)
    multiply(threads, kind(x, matrix, out))  # type: ignore[operator]
    threads.close()
    expected = x.astype(np.float64) @ matrix.weights.astype(np.float64).T
    np.testing.assert_allclose(out[:, :rows], expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 96, 100, 576, 960, 1187, 3072, 49152, 151936, 32001])
@pytest.mark.parametrize("columns", [16, 576, 1536, 4096, 28672])
def test_blocks_cover_the_rows_with_little_padding(rows: int, columns: int) -> None:
    block = block_rows(rows, columns)
    assert block % 8 == 0
    assert -rows % block <= max(7, rows // 8)


def test_a_thread_s_error_reaches_the_caller_and_the_threads_live_on() -> None:
    threads = Threads(3)

    def fail(index: int) -> None:
        if index == 2:
            raise RuntimeError("in thread 2")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="in thread 2"):
            threads.run(fail)
    seen: list[int] = []
    threads.run(seen.append)
    assert sorted(seen) == [0, 1, 2]
    threads.close()


def test_close_ends_the_threads_and_gives_blas_its_own_back() -> None:
    def blas() -> list[int]:
        return [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"]

    before, names = blas(), {thread.name for thread in threading.enumerate()}
    threads = Threads(2)
    assert set(blas()) == {1}
    threads.close()
    threads.close()
    assert blas() == before
    assert {thread.name for thread in threading.enumerate() if thread.is_alive()} == names
