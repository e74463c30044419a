"""The run of these tests on a GPU (tools/device_check.py), rehearsed: nothing in them may need what only the emulated device has."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.devices import PlainDevice

pytestmark = pytest.mark.cxx
ROOT = Path(__file__).parent.parent.parent
nightly = pytest.mark.skipif("STRATA_NIGHTLY" not in os.environ, reason="nightly: set STRATA_NIGHTLY=1")


@pytest.mark.parametrize("files", [["test_draft.py", "test_rms_norm.py"], pytest.param([""], marks=nightly)], ids=["some", "all"])
def test_nothing_needs_the_emulated_device(files):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/kernels/{file}" for file in files)]
    result = subprocess.run(command, env={**os.environ, "STRATA_TEST_DEVICE": "plain"}, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-6000:] + result.stderr[-2000:]


def test_a_plain_device_has_the_verbs_of_every_device_and_no_more():
    device = PlainDevice()
    assert device.memory().total and not any(device.pinned((4,), np.int32))
    for name in ("num_launches", "compiled"):
        with pytest.raises(AttributeError, match=f"a GPU has no {name}"):
            getattr(device, name)
