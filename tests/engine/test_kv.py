"""The paged cache stores what it is given: exactly in f32, within half a step in int8; pages move and are cleared whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.engine.kv import PagedKV, page_bytes

CONFIG: Any = SimpleNamespace(num_kv_heads=3, head_dim=16)
PAGES = np.array([6, 2, 2, 0])
OFFSETS = np.array([0, 5, 6, 15])


def filled(kind: Any) -> tuple[PagedKV, np.ndarray]:
    kv = PagedKV(CONFIG, 2, 8, page_tokens=16, kind=kind)
    rows = (np.random.default_rng(1).standard_normal((4, 2, 3, 16)) * 10.0 ** np.arange(-1, 3)[:, None, None, None]).astype(np.float32)
    kv.clear(np.arange(8))
    kv.write(1, PAGES, OFFSETS, rows)
    return kv, rows


def stored(kv: PagedKV) -> np.ndarray:
    """[rows, 2, heads, dim] of layer 1, as ``levels`` and their scales tell."""
    both = np.empty((2, 4, 3, 16, 16), np.float32)
    for which in (0, 1):
        kv.levels(1, which, PAGES, both[which])
        scales = kv.level_scales(1, which, PAGES)
        if scales is not None:
            both[which] *= scales.swapaxes(2, 3)
    return both[:, np.arange(4), :, OFFSETS]


def page(kv: PagedKV, pages: list[int]) -> np.ndarray:
    """The keys of layer 1, head 2."""
    return kv.head(1, 0, np.array(pages), 2)


def test_f32_is_exact() -> None:
    kv, rows = filled("f32")
    np.testing.assert_array_equal(stored(kv), rows)
    assert not kv.data[0].any()


@pytest.mark.parametrize("kind", ["f32", "int8"])
def test_consecutive_pages_are_what_an_index_of_them_says(kind: Any) -> None:
    kv, _ = filled(kind)
    out = np.empty((2, 3, 3, 16, 16), np.float32)
    by_slice = kv.levels(1, 0, slice(5, 8), out[0])
    np.testing.assert_array_equal(by_slice, kv.levels(1, 0, np.array([5, 6, 7]), out[1]))
    assert np.shares_memory(by_slice, kv.data) == (kind == "f32")
    if kind == "int8":
        np.testing.assert_array_equal(kv.level_scales(1, 0, slice(5, 8)), kv.level_scales(1, 0, np.array([5, 6, 7])))


@pytest.mark.parametrize("kind", ["f32", "int8"])
def test_one_head_is_what_all_heads_say(kind: Any) -> None:
    kv, _ = filled(kind)
    heads = [kv.head(1, 1, PAGES, head).reshape(4, 16, 16)[np.arange(4), OFFSETS] for head in range(3)]
    np.testing.assert_array_equal(np.stack(heads, axis=1), stored(kv)[:, 1])


def test_int8_is_within_half_a_step_of_each_token_and_head() -> None:
    kv, rows = filled("int8")
    step = np.abs(rows).max(axis=-1, keepdims=True) / 127
    # fp16 rounds the step by up to 2^-11 of itself, which 127 levels can turn into 1/16 of a step.
    assert (np.abs(stored(kv) - rows) <= 0.5625 * step).all()


def test_int8_of_zeros_and_of_tiny_values_is_finite() -> None:
    kv, _ = filled("int8")
    kv.write(1, PAGES[:2], OFFSETS[:2], np.stack([np.zeros((2, 3, 16)), np.full((2, 3, 16), 1e-9)]).astype(np.float32))
    assert not stored(kv)[:2].any()


@pytest.mark.parametrize("kind", ["f32", "int8"])
def test_page_bytes_is_what_the_arrays_take(kind: Any) -> None:
    kv, _ = filled(kind)
    total = kv.data.nbytes + (0 if kv.scales is None else kv.scales.nbytes)
    assert page_bytes(CONFIG, 2, 16, kind) * kv.num_pages == total


@pytest.mark.parametrize("kind", ["f32", "int8"])
def test_pages_move(kind: Any) -> None:
    kv, _ = filled(kind)
    before = page(kv, [6, 2])
    image = kv.copy_out((6, 2))
    kv.clear(np.array([6, 2]))
    assert not page(kv, [6, 2]).any()
    kv.copy_in(image, (1, 7))
    np.testing.assert_array_equal(page(kv, [1, 7]), before)
    kv.copy_in(image, (4,))
    np.testing.assert_array_equal(page(kv, [4]), page(kv, [1]))


def test_an_image_that_has_fewer_pages_is_refused() -> None:
    kv, _ = filled("f32")
    with pytest.raises(ValueError, match="2 pages does not fill 3"):
        kv.copy_in(kv.copy_out((6, 2)), (1, 3, 4))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="f16"):
        PagedKV(CONFIG, 1, 1, kind="f16")  # type: ignore[arg-type]
