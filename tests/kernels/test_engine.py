"""The forward pass over kernels, end to end on the emulated device: against the CPU engine, and against itself in other company.

Logits differ from the CPU's because activations, keys and values are int8: for the tiny model (logits' standard deviation 1.3) by
0.05 rms; a wrong scale, order or position would show as 0.5 and more."""

from dataclasses import replace

import numpy as np
import pytest

from strata.engine.device_build import StageSource, load_device_stage
from strata.engine.device_stage import LogitsOnDevice, connect
from strata.engine.numpy_ops import NumpyOps
from strata.errors import ModelError
from strata.messages import EngineFacts, Window
from tests.engine.running import DATA, TINY, Stages, ids, pages_for, random_ids, segment
from tests.kernels.devices import ON_GPU, new_device
from tests.kernels.models import write_mixed

pytestmark = pytest.mark.cxx
FACTS = EngineFacts(num_pages=24, page_tokens=64, context=600, chunk=128, max_rows=6)


class DeviceStages(Stages):
    """The same model and helpers, each stage on an emulated device of its own."""

    def __init__(self, path, splits=(), kv="int8", facts=FACTS, **options):
        super().__init__(path, NumpyOps(1), splits)
        edges = [0, *splits, self.config.num_layers]
        self.devices = [new_device(**options) for _ in edges[1:]]
        self.models = [
            load_device_stage(device, StageSource(self.file, self.config, facts, kv=kv), range(start, stop))
            for device, start, stop in zip(self.devices, edges, edges[1:])
        ]
        connect(self.models)

    def run(self, window):
        """As Stages.run; logits that stayed on the device are fetched."""
        data = super().run(window)
        if not isinstance(data, LogitsOnDevice):
            return data
        host, stream = np.empty(data.buffer.shape, np.float32), self.models[-1].ops.stream
        self.devices[-1].download(host, data.buffer, stream)
        stream.synchronize()
        return host


@pytest.fixture(scope="module")
def tiny():
    with DeviceStages(TINY) as stages:
        yield stages


def prompt_window(tokens, pages, start, every=False):
    return Window(0, "prompt", 0, (segment(tokens, pages, start, every=every),))


def test_logits_are_those_of_the_cpu_within_int8(tiny):
    golden = np.load(DATA / "tiny" / "llama-iq3s.npz")
    logits = tiny.read(ids(golden["ids"]), pages_for(1))
    difference = logits - golden["logits"]
    assert np.sqrt(np.mean(difference**2)) < 0.1 * golden["logits"].std()
    assert np.abs(difference).max() < 0.5 * golden["logits"].std()


def test_f16_pages_bring_logits_nearer_and_change_no_row_in_company(tiny):
    golden = np.load(DATA / "tiny" / "llama-iq3s.npz")
    tokens = random_ids(70, 9)
    with DeviceStages(TINY, kv="f16") as halves:
        got = [model.read(ids(golden["ids"]), pages_for(1)) - golden["logits"] for model in (halves, tiny)]
        near, far = (np.sqrt(np.mean(one**2)) for one in got)
        assert near < far and near < 0.08 * golden["logits"].std()
        whole = halves.read(tokens, pages_for(2, first=4))
        np.testing.assert_array_equal(halves.read(tokens, pages_for(2, first=6), chunk=30), whole)
        pages = pages_for(2, first=8)
        halves.read(tokens[:69], pages)
        rows = [(int(tokens[3]), 61, pages_for(2, first=4)), (tokens[69], 69, pages)]
        np.testing.assert_array_equal(halves.step(rows[1])[0], whole[69])
        np.testing.assert_array_equal(halves.step(*rows)[1], whole[69])
        image = halves.models[0].copy_out(pages)
        halves.models[0].copy_in(image, (20, 14))
        np.testing.assert_array_equal(halves.step((tokens[69], 69, (20, 14)))[0], whole[69])


def test_greedy_tokens_are_those_of_the_cpu_where_the_gap_allows(tiny):
    golden = np.load(DATA / "tiny" / "llama-iq3s.npz")
    pages, prompt = pages_for(1, first=3), ids(golden["greedy_prompt"])
    logits = tiny.read(prompt, pages)[-1]
    for step, (token, gap) in enumerate(zip(ids(golden["greedy"]), golden["greedy_gap"])):
        if gap > 0.5:
            assert logits.argmax() == token
        logits = tiny.step((token, len(prompt) + step, pages))[0]


def test_a_prompt_row_decoded_alone_or_in_a_batch_has_the_same_bits(tiny):
    """70 tokens read as one chunk, in three chunks, and token by token; then decoded beside other slots."""
    tokens = random_ids(70, 1)
    whole = tiny.read(tokens, pages_for(2, first=4))
    chunks = tiny.read(tokens, pages_for(2, first=6), chunk=30)
    np.testing.assert_array_equal(chunks, whole)
    pages = pages_for(2, first=8)
    tiny.read(tokens[:60], pages)
    for position in range(60, 70):
        alone = tiny.step((tokens[position], position, pages))[0]
        np.testing.assert_array_equal(alone, whole[position])
    others = [(int(t), 61, pages_for(2, first=4)) for t in random_ids(4, 2)]
    for place in range(5):
        rows = others[:place] + [(tokens[69], 69, pages)] + others[place:]
        np.testing.assert_array_equal(tiny.step(*rows)[place], whole[69])


def test_a_row_has_the_same_bits_in_windows_of_every_size():
    """The whole layer, with pad rows where a size has no graph of its own; on a GPU at every place."""
    tokens = random_ids(40, 7)
    with DeviceStages(TINY, facts=replace(FACTS, max_rows=32)) as stages:
        stages.read(tokens[:39], pages_for(1, first=4))
        stages.read(random_ids(20, 8), pages_for(1, first=5))
        row, other = (tokens[39], 39, pages_for(1, first=4)), (9, 11, pages_for(1, first=5))
        alone = stages.step(row)[0]
        for count in range(2, 33) if ON_GPU else (2, 7, 9, 13, 32):
            for place in range(count) if ON_GPU else (0, count - 1):
                rows = [other] * place + [row] + [other] * (count - 1 - place)
                np.testing.assert_array_equal(stages.step(*rows)[place], alone, err_msg=f"row {place} of {count}")


def test_a_layer_split_changes_no_bit(tiny):
    tokens = random_ids(20, 3)
    with DeviceStages(TINY, splits=(1, 3)) as split:
        np.testing.assert_array_equal(split.read(tokens, pages_for(1)), tiny.read(tokens, pages_for(1, first=10)))
        row = (7, 20, pages_for(1))
        np.testing.assert_array_equal(split.step(row), tiny.step((7, 20, pages_for(1, first=10))))


def test_a_page_parked_and_restored_elsewhere_holds_the_same_history(tiny):
    tokens, pages = random_ids(66, 4), (11, 12)
    tiny.read(tokens[:65], pages)
    wanted = tiny.step((tokens[65], 65, pages))
    image = tiny.models[0].copy_out(pages)
    tiny.models[0].copy_in(image, (20, 14))
    np.testing.assert_array_equal(tiny.step((tokens[65], 65, (20, 14))), wanted)
    tiny.models[0].copy_in(image, (1,))  # a prefix of it may be lent
    np.testing.assert_array_equal(tiny.models[0].copy_out((1,))[0], image[0])
    with pytest.raises(ValueError, match="image of 2 pages"):
        tiny.models[0].copy_in(image, (1, 2, 3))


@pytest.mark.skipif(ON_GPU, reason="only the emulated device counts launches")
def test_a_decode_window_is_eight_launches_a_layer_and_replays_allocate_nothing():
    with DeviceStages(TINY) as stages:
        [device], [model] = stages.devices, stages.models
        model.forward(prompt_window(random_ids(5), pages_for(1), 0), None)
        before = device.num_launches
        stages.step((5, 5, pages_for(1)))
        assert device.num_launches - before == 8 * 4 + 1 + 2  # layers, embedding, last norm and head
        free, launches = device.memory().free, device.num_launches
        for position in (6, 7):
            stages.step((5, position, pages_for(1)))
        assert len(model.graphs) == 1 and device.num_launches == launches and device.memory().free == free


@pytest.mark.skipif(ON_GPU, reason="only the emulated device counts launches")
def test_a_file_of_mixed_formats_takes_no_more_launches(tmp_path, rng):
    """q, k, v and gate, up of five layouts; decode windows of few rows and of many."""
    write_mixed(tmp_path / "mixed.gguf", rng)
    with DeviceStages(tmp_path / "mixed.gguf") as stages:
        for count in (1, 2):
            before = stages.devices[0].num_launches
            stages.step(*((5, 0, pages_for(1, first=slot)) for slot in range(count)))
            assert stages.devices[0].num_launches - before == 8 * 2 + 1 + 2


def test_logits_are_computed_for_wanted_rows_alone(tiny):
    tokens, pages = random_ids(9, 5), pages_for(1)
    every = tiny.read(tokens, pages)
    last = tiny.run(prompt_window(tokens, pages, 0))
    np.testing.assert_array_equal(last, every[-1:])


def compare_with_the_cpu(path):
    tokens = random_ids(24, 6)
    with Stages(path, NumpyOps(1)) as cpu, DeviceStages(path) as device:
        tokens = tuple(token % cpu.config.vocab_size for token in tokens)
        wanted, got = cpu.read(tokens, pages_for(1)), device.read(tokens, pages_for(1))
    assert wanted.std() > 0.1 and np.sqrt(np.mean((got - wanted) ** 2)) < 0.1 * wanted.std()


@pytest.mark.parametrize("name", ["qwen3", "qwen3-yarn", "llama-yarn"])
def test_other_families_run_on_kernels(name):
    """RoPE by halves, scaled RoPE, q/k norms, tied heads, float weights."""
    compare_with_the_cpu(DATA / "golden" / f"{name}.gguf")


def test_a_mixed_file_runs_on_kernels(tmp_path, rng):
    """q, k, v and gate, up of different layouts, biases, a tied head in yet another format."""
    write_mixed(tmp_path / "mixed.gguf", rng)
    compare_with_the_cpu(tmp_path / "mixed.gguf")


def test_heads_that_kernels_cannot_hold_are_refused_by_name():
    with pytest.raises(ModelError, match="llama-llama3.gguf: heads of 16 dimensions"):
        DeviceStages(DATA / "golden" / "llama-llama3.gguf")
