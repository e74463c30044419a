"""The residual sum."""

import numpy as np
import pytest

from strata.kernels.add import add

pytestmark = pytest.mark.cxx


def test_every_element_is_added_and_no_other(bench, rng):
    x, y = rng.standard_normal((2, 3, 111)).astype(np.float32)
    hidden = bench.put(np.concatenate([x, x]))
    add(bench.device, hidden.rows(0, 3), bench.put(y), bench.stream)
    np.testing.assert_array_equal(bench.get(hidden), np.concatenate([x + y, x]))
