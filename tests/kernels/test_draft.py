"""The kernels of a draft block: its input, hidden rows that move, drafts picked over a part of the vocabulary."""

from dataclasses import replace

import numpy as np
import pytest

from strata.kernels.draft import clear, join_norms, move_rows
from strata.kernels.rms_norm import rms_norm
from strata.kernels.sample import DraftHead, History, choices_of, put_choices, sample
from strata.kernels.tensors import allocate_activations
from strata.request import Sampling
from tests.kernels import twins

pytestmark = pytest.mark.cxx
f32 = np.float32


@pytest.mark.parametrize("width", [64, 72, 576])
def test_the_input_is_two_norms_beside_each_other(bench, rng, width):
    """A width that ends within a group of 32; a first token, whose hidden row is zeros."""
    embedding, store = rng.standard_normal((4, width)).astype(f32), rng.standard_normal((6, width)).astype(f32)
    enorm, hnorm = rng.uniform(0.5, 1.5, (2, width)).astype(f32)
    sources = np.array([5, -1, 0, 5], np.int32)
    store[[1, 2, 3, 4]] = np.nan  # not asked for
    out = allocate_activations(bench.device, 4, 2 * width)
    norms = bench.put(enorm), bench.put(hnorm)
    join_norms(bench.device, bench.put(embedding), bench.put(store), bench.put(sources), norms, 1e-5, out, bench.stream)
    right = twins.rms_norm(store, hnorm, 1e-5)[sources]
    right[1] = 0
    codes, meta = twins.quantize(np.concatenate([twins.rms_norm(embedding, enorm, 1e-5), right], axis=1))
    np.testing.assert_array_equal(bench.get(out.codes), codes)
    np.testing.assert_array_equal(bench.get(out.meta), meta)


def test_a_broken_hidden_row_stays_in_its_row(bench, rng):
    embedding, store = rng.standard_normal((3, 64)).astype(f32), rng.standard_normal((3, 64)).astype(f32)
    norms = bench.put(np.ones(64, f32)), bench.put(np.ones(64, f32))

    def run(rows, store):
        out = allocate_activations(bench.device, len(rows), 128)
        arguments = bench.put(embedding[rows]), bench.put(store), bench.put(np.array(rows, np.int32))
        join_norms(bench.device, *arguments, norms, 1e-5, out, bench.stream)
        return bench.get(out.codes), bench.get(out.meta)

    alone = run([0], store)
    store[1] = np.nan
    codes, meta = run([1, 0, 1], store)
    np.testing.assert_array_equal(codes[1], alone[0][0])
    np.testing.assert_array_equal(meta[1], alone[1][0])
    assert np.isnan(meta[[0, 2], 2:, 0].copy().view(f32)).all()


def test_rows_move_and_others_stay(bench, rng):
    store = rng.standard_normal((7, 300)).astype(f32)
    buffer, moves = bench.put(store), np.array([(0, 5), (-1, 2), (3, -1), (0, 6)], np.int32)
    move_rows(bench.device, buffer, bench.put(moves), bench.stream)
    store[[5, 6]] = store[0]
    np.testing.assert_array_equal(bench.get(buffer), store)


def test_a_part_of_each_line_is_cleared(bench, rng):
    lines = rng.integers(-128, 128, (5, 96), dtype=np.int8)
    buffer = bench.put(lines)
    clear(bench.device, buffer, 8, 60, bench.stream)
    lines[:, 8:68] = 0
    np.testing.assert_array_equal(bench.get(buffer), lines)


def test_a_norm_keeps_its_rows_as_floats_too(bench, rng):
    x, delta = rng.standard_normal((2, 4, 96)).astype(f32)
    gamma, rows = rng.standard_normal(96).astype(f32), np.array([2, 0, 3], np.int32)
    results = []
    for floats in (None, bench.empty((5, 96))):
        hidden, out = bench.put(x), allocate_activations(bench.device, 3, 96)
        rms_norm(bench.device, bench.put(rows), hidden, bench.put(delta), bench.put(gamma), 1e-5, out, bench.stream, floats)
        results.append([bench.get(buffer) for buffer in (out.codes, out.meta, hidden)])
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)
    kept = bench.get(floats)
    np.testing.assert_array_equal(kept[rows], twins.rms_norm(x + delta, gamma, 1e-5)[rows])
    assert np.isnan(kept[[1, 4]]).all()


SAMPLINGS = [
    Sampling(temperature=0.0), Sampling(temperature=0.9, seed=3), Sampling(temperature=0.7, seed=8, top_k=9, logit_bias=((40, 2.0),)),
]  # fmt: skip


def test_drafts_over_a_part_of_the_vocabulary_are_the_picks_of_logits_cut_to_it(bench, rng):
    """The same noise for the same token: what the whole head would pick if it gave the other tokens nothing."""
    vocab, vocabulary = 90, rng.permutation(90)[:33].astype(np.int32)
    logits = rng.standard_normal((6, vocab)).astype(f32) * 2
    logits[5] = np.nan
    rows = [(SAMPLINGS[i % 3], 100 + i, History()) for i in range(6)]
    place = {int(token): i for i, token in enumerate(vocabulary)}
    biases = [tuple((place[token], value) for token, value in sampling.logit_bias if token in place) for sampling, *_ in rows]
    within = [(replace(sampling, logit_bias=bias), *rest) for (sampling, *rest), bias in zip(rows, biases)]
    cut = np.full_like(logits, -1e30)
    cut[:, vocabulary] = logits[:, vocabulary]
    cut[5] = np.nan
    whole, part, sure = bench.empty((6,), np.int32), bench.empty((6,), np.int32), bench.empty((6,))
    choices = put_choices(bench.device, choices_of(rows, vocab), bench.stream)
    sample(bench.device, bench.put(cut), bench.empty((6, vocab)), choices, whole, bench.stream)
    head = DraftHead(bench.put(vocabulary), sure)
    choices = put_choices(bench.device, choices_of(within, 33), bench.stream)
    sample(bench.device, bench.put(np.ascontiguousarray(logits[:, vocabulary])), bench.empty((6, 33)), choices, part, bench.stream, head)
    picks = bench.get(part)
    np.testing.assert_array_equal(picks, bench.get(whole))
    probabilities = bench.get(sure)
    for row in range(5):
        exp = np.exp(logits[row, vocabulary].astype(np.float64))
        np.testing.assert_allclose(probabilities[row], exp[place[picks[row]]] / exp.sum(), rtol=1e-5)
    assert picks[5] == -1 and probabilities[5] == 0


def test_wrong_shapes_are_refused_by_name(one_bench):
    bench = one_bench
    norms = bench.empty((64,)), bench.empty((64,))
    out = allocate_activations(bench.device, 2, 128)
    with pytest.raises(TypeError, match="sources must be"):
        join_norms(bench.device, bench.empty((2, 64)), bench.empty((9, 64)), bench.empty((3,), np.int32), norms, 1e-5, out, bench.stream)
    with pytest.raises(TypeError, match="128 outputs for two rows of 32"):
        norms = bench.empty((32,)), bench.empty((32,))
        join_norms(bench.device, bench.empty((2, 32)), bench.empty((9, 32)), bench.empty((2,), np.int32), norms, 1e-5, out, bench.stream)
    with pytest.raises(TypeError, match="moves must be"):
        move_rows(bench.device, bench.empty((2, 64)), bench.empty((2, 3), np.int32), bench.stream)
