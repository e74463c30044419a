"""What a window's metadata says to kernels."""

import numpy as np
import pytest

from strata.engine.rope import Rope, RopeConfig
from strata.engine.window_upload import Fields, fill
from strata.messages import Segment, Window
from strata.request import Sampling

ROPE = Rope(RopeConfig(base=10000.0, dims=8, interleaved=True))


def filled(window, fields):
    host = np.full(fields.words, 77, np.int32)
    fill(host, window, fields, ROPE, scratch_page=9)
    return {name: host[at:at + int(np.prod(shape))].reshape(shape) for name, (at, shape) in fields.spans().items()}


def test_a_decode_window_is_padded_with_rows_of_the_scratch_page():
    segments = (Segment("a", 0, 5, (11,), (3,), Sampling()), Segment("b", 1, 64, (12, 13), (4, 6), Sampling(), num_drafts=1))
    views = filled(Window(0, "decode", 0, segments), Fields(6, 6, 2, 4))
    assert views["tokens"].tolist() == [11, 12, 13, 0, 0, 0]
    assert views["positions"].tolist() == [5, 64, 65, 0, 0, 0]
    assert views["row_table"].tolist() == [0, 1, 1, 5, 5, 5]
    assert views["tables"].tolist() == [[3, 9], [4, 6], [9, 9], [9, 9], [9, 9], [9, 9]]
    turns = views["turns"].view(np.float32)
    np.testing.assert_allclose(turns[2, 1], [np.cos(65 / 10), np.sin(65 / 10)], rtol=1e-6)


@pytest.mark.parametrize("every", [True, False])
def test_no_row_is_wanted_twice(every):
    """The last norm adds to the rows it is given, in place: a pad that named a real row would race with it."""
    part = Segment("a", 0, 5, (11, 12, 13), (3,), None, prompt_logprobs=0 if every else -1)
    segments = (Segment("b", 1, 7, (1,), (4,), Sampling()), part, Segment("c", 2, 9, (2, 3), (5,), Sampling(), num_drafts=1))
    wanted = filled(Window(0, "decode", 0, segments), Fields(8, 8, 1, 4))["wanted"]
    assert wanted[:3].tolist() == ([0, 1, 2] if every else [0, 4, 5])
    assert sorted(wanted) == list(range(8))
