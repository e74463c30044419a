"""Models with experts through the forward pass over kernels: against llama.cpp's logits, and against themselves in other company.

Logits differ from float32's because activations, keys and values are int8, and more so where that changes which experts a row takes: of the
tiny models' rows a few do, with logits off by up to one standard deviation; the others stay within the bound of dense models."""

from dataclasses import replace

import numpy as np
import pytest

from strata.engine.numpy_ops import NumpyOps
from tests.engine.drafting import rewritten
from tests.engine.running import DATA, Stages, ids, pages_for, random_ids
from tests.engine.test_routing import in_groups
from tests.kernels.devices import ON_GPU
from tests.kernels.test_engine import FACTS, DeviceStages

pytestmark = pytest.mark.cxx
NAMES = ("qwen3moe", "glm4moe")


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    path = DATA / "tiny" / f"{request.param}-iq3s.gguf"
    with DeviceStages(path, facts=replace(FACTS, max_rows=12, chunk=64)) as stages:
        stages.golden = np.load(path.with_suffix(".npz"))
        stages.path = path
        yield stages


def test_logits_are_those_of_float32_within_int8(model):
    golden = model.golden
    logits = model.read(ids(golden["ids"]), pages_for(1))
    by_row = off(logits, golden["logits"])
    assert np.median(by_row) < 0.1 and by_row.max() < 0.8


def off(found, right):
    """How far each row is off, in standard deviations of what is right."""
    return np.sqrt(np.mean((found - right) ** 2, axis=1)) / right.std()


def test_routing_with_groups_a_scale_and_biases_is_that_of_the_cpu(tmp_path):
    path, tokens = rewritten("glm4moe-iq3s", tmp_path / "m.gguf", in_groups), random_ids(24, 6)
    with Stages(path, NumpyOps(1)) as cpu, DeviceStages(path) as device:
        wanted, got = cpu.read(tokens, pages_for(1)), device.read(tokens, pages_for(1))
    assert np.median(off(got, wanted)) < 0.1


def test_greedy_tokens_are_those_of_float32_where_the_gap_allows(model):
    golden = model.golden
    pages, prompt = pages_for(1, first=3), ids(golden["greedy_prompt"])
    logits, equal = model.read(prompt, pages)[-1], []
    for step, token in enumerate(ids(golden["greedy"])):
        equal.append(logits.argmax() == token)
        logits = model.step((token, len(prompt) + step, pages))[0]
    equal, gaps = np.array(equal), golden["greedy_gap"]
    assert equal[gaps > 1].all() and equal[gaps > 0.25].mean() > 0.85


def test_a_row_has_the_same_bits_read_in_chunks_decoded_alone_and_in_a_batch(model):
    tokens = random_ids(44, 1)
    whole = model.read(tokens, pages_for(1, first=4))
    np.testing.assert_array_equal(model.read(tokens, pages_for(1, first=5), chunk=17), whole)
    pages = pages_for(1, first=6)
    model.read(tokens[:40], pages)
    for position in range(40, 44):
        np.testing.assert_array_equal(model.step((tokens[position], position, pages))[0], whole[position])
    others = [(int(token), 43, pages_for(1, first=4)) for token in random_ids(11, 2)]
    for others_before, others_after in ((1, 0), (2, 3), (0, 11)):
        rows = others[:others_before] + [(tokens[43], 43, pages)] + others[others_before:others_before + others_after]
        np.testing.assert_array_equal(model.step(*rows)[others_before], whole[43])


def test_a_layer_split_changes_no_bit(model):
    tokens = random_ids(9, 3)
    with DeviceStages(model.path, splits=(2,)) as split:
        np.testing.assert_array_equal(split.read(tokens, pages_for(1)), model.read(tokens, pages_for(1, first=10)))
        np.testing.assert_array_equal(split.step((7, 9, pages_for(1))), model.step((7, 9, pages_for(1, first=10))))


@pytest.mark.skipif(ON_GPU, reason="only the emulated device counts launches")
def test_launches_of_a_decode_window(model):
    """Nine a layer with experts, two more where all rows share one, two more from nine rows on; replays allocate nothing."""
    [device], [stage] = model.devices, model.models
    layer = {"qwen3moe": 9 * 4, "glm4moe": 8 + 11 * 3}[model.path.name.split("-")[0]]
    for rows, more in ((1, 0), (12, 2)):
        before = device.num_launches
        window = [(5, 0, pages_for(1, first=slot)) for slot in range(rows)]
        model.step(*window)
        routed = sum(layer.routed is not None for layer in stage.weights.layers)
        first = device.num_launches - before
        assert first in (0, layer + more * routed + 1 + 2)  # 0: another test has captured it
        free, launches = device.memory().free, device.num_launches
        model.step(*window)
        assert device.num_launches == launches and device.memory().free == free
