"""Experts: decoded as the file has them, kept as far as they may be, multiplied as plain loops would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from strata.engine import mixture as mixture_module
from strata.engine.experts import ExpertStore, LayerExperts, expert_floats
from strata.engine.mixture import Mixture
from strata.engine.numpy_ops import NumpyOps
from strata.engine.products import Arena
from strata.engine.threads import Threads
from strata.weights.formats import BY_NAME, dequantize
from strata.weights.gguf import GGUFFile, Tensor
from tests.engine.running import MOE, Floats, Stages, pages_for, random_ids

WIDTH, INNER, COUNT = 72, 40, 6
SIZE = 4 * expert_floats(256, 256)  # bytes of one expert of the fixtures


@pytest.fixture
def file() -> Iterator[GGUFFile]:
    with GGUFFile.open(MOE[0]) as opened:
        yield opened


def tensors(file: GGUFFile, block: int) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, down = (file.tensors[f"blk.{block}.ffn_{which}_exps.weight"] for which in ("gate", "up", "down"))
    return gate, up, down


def store_of(limit: int | None, threads: int = 1) -> ExpertStore:
    return ExpertStore(Threads(threads), Arena(), limit)


def test_an_expert_is_what_the_file_holds(file: GGUFFile) -> None:
    gate, up, down = (dequantize(tensor) for tensor in tensors(file, 2))
    store = store_of(None, threads=2)
    layer = store.add(*tensors(file, 2))
    (lot,) = store.lots(layer, [5, 0])
    for number, expert in zip((5, 0), lot, strict=True):
        np.testing.assert_array_equal(expert.gate_up.reshape(-1, 256)[:512], np.concatenate([gate[number], up[number]]))
        np.testing.assert_array_equal(expert.down.reshape(-1, 256)[:256], down[number])


def test_with_room_for_all_each_is_decoded_once_at_load(file: GGUFFile) -> None:
    store = store_of(None)
    layers = [store.add(*tensors(file, block)) for block in range(2)]
    assert store.decoded == 16
    for layer in layers:
        assert [len(lot) for lot in store.lots(layer, range(8))] == [8]
    assert store.decoded == 16


def test_the_experts_used_last_are_kept(file: GGUFFile) -> None:
    store = store_of(3 * SIZE)
    first, second = (store.add(*tensors(file, block)) for block in range(2))
    assert store.decoded == 0

    def decoded(layer: LayerExperts, *wanted: int) -> int:
        before = store.decoded
        assert [len(lot) for lot in store.lots(layer, wanted)] == [len(wanted)]
        return store.decoded - before

    assert decoded(first, 0, 1) == 2
    assert decoded(second, 0) == 1
    assert decoded(first, 0) == 0
    assert decoded(second, 7) == 1  # instead of expert 1 of the first block
    assert decoded(first, 0) == decoded(second, 0) == 0
    assert decoded(first, 1) == 1  # instead of expert 7 of the second
    assert decoded(first, 0) == decoded(second, 0) == 0
    assert decoded(second, 7) == 1


@pytest.mark.parametrize(("limit", "sizes"), [(0, [1] * 5), (2 * SIZE, [2, 2, 1]), (4 * SIZE + 1, [4, 1]), (99 * SIZE, [5])])
def test_more_than_there_is_room_for_comes_in_lots(file: GGUFFile, limit: int, sizes: list[int]) -> None:
    store = store_of(limit)
    layer = store.add(*tensors(file, 0))
    whole = dequantize(layer.tensors[2])
    wanted = [0, 2, 3, 5, 7]
    seen = []
    for lot in store.lots(layer, wanted):
        seen += [expert.down.reshape(-1, 256)[:256].copy() for expert in lot]
        assert len(lot) == sizes.pop(0)
    np.testing.assert_array_equal(seen, whole[wanted])


def test_an_expert_that_cannot_be_decoded_is_not_kept(file: GGUFFile, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(8 * SIZE)
    layer = store.add(*tensors(file, 0))
    with monkeypatch.context() as patched:
        patched.setattr("strata.engine.experts.dequantize_blocks", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(store.lots(layer, [3]))
    ((expert,),) = store.lots(layer, [3])
    np.testing.assert_array_equal(expert.down.reshape(-1, 256)[:256], dequantize(layer.tensors[2])[3])


def stored(seed: int, rows: int, columns: int) -> Tensor:
    """COUNT matrices of float32 as a file would have them."""
    values = np.random.default_rng(seed).standard_normal((COUNT, rows, columns)).astype(np.float32)
    return cast(Tensor, SimpleNamespace(type=BY_NAME["F32"], shape=values.shape, data=values.reshape(-1).view(np.uint8)))


def mixture(threads: int, limit: int | None = None) -> tuple[NumpyOps, Mixture, LayerExperts]:
    ops = NumpyOps(threads, expert_bytes=limit)
    return ops, ops.mixture, ops.mixture.store.add(stored(1, INNER, WIDTH), stored(2, INNER, WIDTH), stored(3, WIDTH, INNER))


def rows_and_choices(rows: int, used: int) -> tuple[Floats, NDArray[np.int64], Floats]:
    rng = np.random.default_rng(rows)
    chosen = np.array([rng.permutation(COUNT)[:used] for _ in range(rows)])
    return rng.standard_normal((rows, WIDTH)).astype(np.float32), chosen, rng.random((rows, used), np.float32)


@pytest.mark.parametrize("rows", [1, 2, 8, 150])
@pytest.mark.parametrize(("used", "threads", "limit"), [(1, 1, None), (2, 3, None), (5, 2, 0), (3, 2, 8 * expert_floats(WIDTH, INNER))])
def test_a_mixture_is_the_weighted_sum_of_its_experts(rows: int, used: int, threads: int, limit: int | None) -> None:
    ops, mixed, layer = mixture(threads, limit)
    x, chosen, weights = rows_and_choices(rows, used)
    result = mixed.mix(x, chosen, weights, layer)
    ops.close()
    gate, up, down = (dequantize(tensor).astype(np.float64) for tensor in layer.tensors)
    expected = np.zeros((rows, WIDTH))
    for row in range(rows):
        for expert, weight in zip(chosen[row], weights[row], strict=True):
            inner = gate[expert] @ x[row]
            expected[row] += weight * (down[expert] @ (inner / (1 + np.exp(-inner)) * (up[expert] @ x[row])))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_only_experts_that_a_row_goes_to_are_decoded(rows: int) -> None:
    ops, mixed, layer = mixture(1, limit=COUNT * 4 * expert_floats(WIDTH, INNER))
    x, chosen, weights = rows_and_choices(rows, 2)
    for _ in range(2):
        mixed.mix(x, chosen, weights, layer)
        assert mixed.store.decoded == len(set(chosen.ravel().tolist()))
    ops.close()


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_an_expert_is_multiplied_once_by_all_its_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up together, then down."""
    ops, mixed, layer = mixture(1)
    x, chosen, weights = rows_and_choices(rows, 2)
    product, seen = mixture_module.grouped_product, []
    monkeypatch.setattr(mixture_module, "grouped_product", lambda x, groups, *more: seen.append(groups) or product(x, groups, *more))
    mixed.mix(x, chosen, weights, layer)
    ops.close()
    sizes = np.unique(chosen, return_counts=True)[1].tolist()
    assert [[rows.stop - rows.start for rows, _ in groups] for groups in seen] == [sizes, sizes]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_its_own_bits_among_damaged_ones_of_its_experts(threads: int) -> None:
    ops, mixed, layer = mixture(threads)
    x, chosen, weights = rows_and_choices(40, 2)
    alone = [mixed.mix(x[row : row + 1], chosen[row : row + 1], weights[row : row + 1], layer)[0] for row in range(40)]
    np.testing.assert_array_equal(mixed.mix(x, chosen, weights, layer), alone)
    damaged = x.copy()
    damaged[1::2] = np.nan
    with np.errstate(all="ignore"):
        result = mixed.mix(damaged, chosen, weights, layer)
    ops.close()
    np.testing.assert_array_equal(result[::2], alone[::2])
    assert np.isnan(result[1::2]).all()


@pytest.mark.parametrize("path", MOE[:2], ids=lambda path: path.stem)
def test_what_is_kept_decoded_changes_no_bit(path: Path) -> None:
    tokens, pages, results = random_ids(150), pages_for(3), []
    for limit in (None, 0, 5 * SIZE, 20 * SIZE):
        with Stages(path, NumpyOps(2, expert_bytes=limit)) as stages:
            read = stages.read(tokens[:-2], pages, chunk=128)
            steps = [stages.step((token, 148 + index, pages)) for index, token in enumerate(tokens[-2:])]
            results.append(np.concatenate([read, *steps]))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
