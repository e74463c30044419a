"""Keys and values as float16: what the pages hold, attention over it in float64, the same bits for a row in any company."""

import numpy as np
import pytest

from strata.kernels.attention import attention
from strata.kernels.pages import Pages, PageShape
from strata.kernels.store_heads import store_heads
from tests.kernels import twins
from tests.kernels.test_attention import MAX_PAGES, SLOTS, Cache, fill, head_norm, one_row, outputs, run_decode, turned

pytestmark = pytest.mark.cxx
f32, f16 = np.float32, np.float16


class HalfCache(Cache):
    """As Cache, with pages that begin as NaN everywhere: nothing unwritten may be seen."""

    def __init__(self, bench, rng, head_dim, kv_heads, page_tokens=64):
        super().__init__(bench, rng, head_dim, kv_heads, page_tokens)
        self.shape = PageShape(2, kv_heads, head_dim, page_tokens, "f16")
        nothing = np.full((SLOTS * MAX_PAGES, self.shape.page_bytes // 2), np.nan, f16)
        self.pages = Pages(self.shape, bench.put(nothing.view(np.int8)))

    def halves(self, slot, layer, length):
        """(keys, values) float16 [length, kv_heads, head_dim]."""
        shape, tokens = self.shape, self.shape.page_tokens
        pool = self.bench.get(self.pages.data).view(f16).reshape(-1, shape.layers, shape.kv_heads, 2, tokens * shape.head_dim)
        heads = pool[self.tables[slot], layer]
        keys = heads[:, :, 0].reshape(MAX_PAGES, shape.kv_heads, tokens, shape.head_dim)
        values = heads[:, :, 1].reshape(MAX_PAGES, shape.kv_heads, shape.head_dim, tokens).swapaxes(2, 3)
        return [x.swapaxes(1, 2).reshape(MAX_PAGES * tokens, shape.kv_heads, -1)[:length] for x in (keys, values)]


def half_queries(cache, queries):
    return cache.bench.get(queries.codes).view(f16)


@pytest.mark.parametrize("head_dim, heads, kv_heads, normed", [(64, 4, 2, False), (96, 2, 2, True)])
def test_heads_are_normed_turned_and_stored_as_halves(bench, rng, head_dim, heads, kv_heads, normed):
    cache = HalfCache(bench, rng, head_dim, kv_heads, page_tokens=32)
    gammas = rng.standard_normal((2, head_dim)).astype(f32) if normed else None
    qkv, turns, queries = fill(cache, rng, 1, 70, heads, gammas)
    q, k, v = np.split(qkv, [heads, heads + kv_heads], axis=1)
    if normed:
        q, k = head_norm(q, gammas[0], 1e-6), head_norm(k, gammas[1], 1e-6)
    np.testing.assert_array_equal(half_queries(cache, queries), (turned(q.copy(), turns) * f32(head_dim**-0.5)).astype(f16))
    keys, values = cache.halves(1, 1, 70)
    np.testing.assert_array_equal(keys, turned(k.copy(), turns).astype(f16))
    np.testing.assert_array_equal(values, v.astype(f16))


def attention_twin(queries, keys, values):
    """float64 [heads, head_dim] for one row; the weights of values as float16, as the tensor cores take them."""
    group = len(queries) // keys.shape[1]
    out = []
    for head, query in enumerate(queries.astype(np.float64)):
        scores = keys[:, head // group].astype(np.float64) @ query
        acc, total, best = 0.0, 0.0, scores.max()
        for start in range(0, len(scores), 256):
            part = scores[start : start + 256]
            p, add = np.exp(part - part.max()), np.exp(part.max() - best)
            acc = acc + add * (p.astype(f32).astype(f16).astype(np.float64) @ values[start : start + 256, head // group])
            total += add * p.sum()
        out.append(acc / total)
    return np.array(out)


@pytest.mark.parametrize("head_dim, heads, kv_heads", [(64, 4, 2), (128, 3, 1), (96, 2, 2), (256, 10, 1)])
def test_attention_is_the_twin(bench, rng, head_dim, heads, kv_heads):
    """A weight at a rounding edge may become the neighbouring half, 2**-11 of itself off, and so may the result that it makes most of; one
    in 256 codes of the result is at an edge too. A position more or less would be 2**-9."""
    cache, used = HalfCache(bench, rng, head_dim, kv_heads), heads * head_dim
    _, _, queries = fill(cache, rng, 2, 530, heads)
    for row in (0, 255, 529):
        codes, meta = run_decode(cache, one_row(bench, queries, row), cache.places([2], [row]), 1, heads)
        wanted = attention_twin(half_queries(cache, queries)[row], *cache.halves(2, 1, row + 1)).reshape(1, -1)
        wanted_codes, wanted_meta = twins.quantize(wanted.astype(f32))
        difference = np.abs(codes[0, :used].astype(int) - wanted_codes[0, :used])
        assert difference.max() <= 1 and (difference == 0).mean() > 0.95
        scales, wanted_scales = (x[0, : used // 32, 0].copy().view(f32) for x in (meta, wanted_meta))
        np.testing.assert_allclose(scales, wanted_scales, rtol=2.0**-11)


@pytest.mark.parametrize("head_dim, heads, kv_heads", [(64, 4, 2), (64, 3, 3)])
def test_a_row_of_a_prompt_has_the_bits_of_a_decode_row_in_any_company(bench, rng, head_dim, heads, kv_heads):
    cache, used = HalfCache(bench, rng, head_dim, kv_heads), heads * head_dim
    _, _, queries = fill(cache, rng, 0, 300, heads)
    fill(cache, rng, 1, 40, heads)
    prompt = outputs(cache, 300, heads)
    attention(bench.device, queries, cache.places([0] * 300, range(300)), 1, cache.pages, None, prompt, bench.stream)
    prompt = bench.get(prompt.codes), bench.get(prompt.meta)
    for row in (0, 31, 32, 255, 256, 299):
        alone = run_decode(cache, one_row(bench, queries, row), cache.places([0], [row]), 1, heads, context=row + 1)
        np.testing.assert_array_equal(alone[0][0, :used], prompt[0][row, :used])
        np.testing.assert_array_equal(alone[1][0, : used // 32], prompt[1][row, : used // 32])
    slots, index = [0, 1, 0, 0, 1, 0], [299, 10, 256, 0, 20, 31]
    batch = type(queries)(bench.put(bench.get(queries.codes)[index]), bench.put(bench.get(queries.scales)[index]))
    together = run_decode(cache, batch, cache.places(slots, index), 6, heads, context=700)
    for place, (slot, row) in enumerate(zip(slots, index)):
        if slot == 0:
            np.testing.assert_array_equal(together[0][place, :used], prompt[0][row, :used])
            np.testing.assert_array_equal(together[1][place, : used // 32], prompt[1][row, : used // 32])


@pytest.mark.parametrize("place", [2, 3], ids=["key", "value"])
def test_a_broken_position_breaks_the_rows_that_see_it_and_no_other(bench, rng, place):
    cache = HalfCache(bench, rng, 64, 1)
    qkv, turns, queries = fill(cache, rng, 0, 80, 2)
    places, metas = cache.places([0] * 80, range(80)), []
    for broken in (False, True):
        if broken:
            qkv[50, place, 7] = np.nan
        store_heads(bench.device, bench.put(qkv), bench.put(turns), None, places, 1, cache.pages, queries, bench.stream)
        out = outputs(cache, 80, 2)
        attention(bench.device, queries, places, 1, cache.pages, None, out, bench.stream)
        metas.append(bench.get(out.meta))
    before, after = metas
    np.testing.assert_array_equal(after[:50], before[:50])
    assert np.isfinite(before[:, :4, 0].copy().view(f32)).all() and np.isnan(after[50:, :4, 0].copy().view(f32)).all()


def test_values_beyond_a_half_are_clamped(bench, rng):
    cache = HalfCache(bench, rng, 64, 1)
    qkv, turns, queries = fill(cache, rng, 0, 8, 2)
    qkv[3, 2:] = [[1e6], [-1e6]]
    places = cache.places([0] * 8, range(8))
    store_heads(bench.device, bench.put(qkv), bench.put(turns), None, places, 1, cache.pages, queries, bench.stream)
    _, values = cache.halves(0, 1, 8)
    assert (values[3] == -65504).all() and np.isfinite(values).all()
