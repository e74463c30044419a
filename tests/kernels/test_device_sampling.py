"""Results from logits on the device are those of the CPU's sampler from the same logits, drafts and logprobs included."""

from types import SimpleNamespace

import numpy as np
import pytest

from strata.engine import device_sampling
from strata.engine.device_sampling import DeviceSampler
from strata.engine.device_stage import LogitsOnDevice
from strata.engine.results import Sampler
from strata.engine.rows import wanted_rows
from strata.messages import Segment, Window
from strata.request import Sampling
from tests.kernels.devices import ON_GPU

pytestmark = pytest.mark.cxx
VOCAB = 400


def ops(bench):
    return SimpleNamespace(device=bench.device, stream=bench.stream, config=SimpleNamespace(vocab_size=VOCAB))


def segments(rng, favourites):
    """Greedy, seeded, penalised, filtered rows; one with drafts of which the first is right; one chunk that picks nothing."""
    history = (tuple(rng.integers(0, 50, 30).tolist()), rng.integers(0, 50, 10).tolist())
    samplings = [
        Sampling(temperature=0.0, logprobs=3), Sampling(seed=2, logprobs=0), Sampling(seed=3, top_k=20, top_p=0.9),
        Sampling(seed=4, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1, logit_bias=((5, 2.0),)),
    ]  # fmt: skip
    rows = [Segment(f"r{n}", n, 40 + n, (7,), (n,), one, history=history) for n, one in enumerate(samplings)]
    rows.append(Segment("drafts", 4, 60, (7, favourites[4], 3), (4,), Sampling(temperature=0.0, logprobs=1), num_drafts=2))
    rows.append(Segment("part", 5, 0, (1, 2), (5,)))
    return tuple(rows)


def test_results_are_the_cpu_samplers(one_bench, rng):
    logits = rng.standard_normal((7, VOCAB)).astype(np.float32)
    window = Window(1, "decode", 0, segments(rng, logits.argmax(axis=1).tolist()))
    assert len(wanted_rows(window)) == 7
    sampler = DeviceSampler(ops(one_bench))
    free = one_bench.device.memory().free
    for number in range(3):
        got = sampler(window, LogitsOnDevice(one_bench.put(logits)))
        wanted = Sampler()(window, logits)
        assert [(one.picks, one.accepted, one.error) for one in got] == [(one.picks, one.accepted, one.error) for one in wanted]
        for mine, theirs in zip(got, wanted):
            assert [one.token for one in mine.logprobs] == [one.token for one in theirs.logprobs]
            for one, other in zip(mine.logprobs, theirs.logprobs):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
                assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert got[4].accepted >= 1 and got[5].picks == ()
        logits[1] = [np.nan, np.inf, -np.inf][number]
        assert sampler(window, LogitsOnDevice(one_bench.put(logits)))[1].error
        logits[1] = rng.standard_normal(VOCAB)
    assert ON_GPU or one_bench.device.memory().free == free  # a GPU's driver takes some when it likes


def test_what_does_not_fit_the_device_is_the_cpu_samplers(one_bench, rng, monkeypatch):
    """More tokens with a bias than there is room for, and more alternatives: no other tokens, no more memory."""
    monkeypatch.setattr(device_sampling, "MAX_ENTRIES", 100)
    logits = rng.standard_normal((2, VOCAB)).astype(np.float32)
    bias = tuple((token, float(rng.normal())) for token in range(101))
    sampler, results = DeviceSampler(ops(one_bench)), []
    for many in (bias, bias[:50]):
        samplings = [Sampling(seed=2, logit_bias=many), Sampling(temperature=0.0, logprobs=25 if many is bias else 3)]
        window = Window(1, "decode", 0, tuple(Segment(f"r{n}", n, 9, (7,), (n,), one) for n, one in enumerate(samplings)))
        results.append((sampler(window, LogitsOnDevice(one_bench.put(logits))), Sampler()(window, logits)))
    for mine, theirs in results:
        assert [one.picks for one in mine] == [one.picks for one in theirs]
        assert [len(one.logprobs[0].top) for one in mine if one.logprobs] == [len(one.logprobs[0].top) for one in theirs if one.logprobs]


def test_a_window_that_wants_no_logits_has_empty_results(one_bench):
    window = Window(1, "prompt", 0, (Segment("part", 0, 0, (1, 2), (5,)),))
    sampler = DeviceSampler(ops(one_bench))
    [result] = sampler(window, LogitsOnDevice(one_bench.empty((0, VOCAB))))
    assert result.picks == () and not result.error
