"""The SwiGLU of unjoined gate and up. exp differs in its last bit between libraries, which may move a code by one at an edge."""

import numpy as np
import pytest

from strata.kernels.swiglu import swiglu
from strata.kernels.tensors import allocate_activations
from tests.kernels import twins

pytestmark = pytest.mark.cxx


def test_swiglu_is_the_twin(bench, rng):
    gate_up = rng.standard_normal((3, 640)).astype(np.float32)
    gate, up = np.split(gate_up, 2, axis=1)
    codes, meta = twins.quantize(gate / (1 + np.exp(-gate)) * up)
    out = allocate_activations(bench.device, 3, 320)
    swiglu(bench.device, bench.put(gate_up), out, bench.stream)
    got = bench.get(out.codes).astype(int)
    assert np.abs(got - codes).max() <= 1 and (got == codes).mean() > 0.99
    scales = bench.get(out.meta)[..., 0].copy().view(np.float32)
    np.testing.assert_allclose(scales, meta[..., 0].copy().view(np.float32), rtol=1e-6)


def test_rows_that_are_no_whole_groups_are_refused(one_bench):
    out = allocate_activations(one_bench.device, 1, 48)
    with pytest.raises(TypeError, match="48 columns"):
        swiglu(one_bench.device, one_bench.empty((1, 96)), out, one_bench.stream)
