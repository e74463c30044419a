"""An engine on devices: what fits by the plan, and a request through the real pipeline."""

import queue
import re
from dataclasses import replace

import pytest

from strata.config import Settings
from strata.devices.emulated import EmulatedDevice
from strata.devices.host_compiler import find_compiler
from strata.engine.device_load import assemble_on_devices
from strata.engine.device_bytes import weight_bytes
from strata.engine.device_plan import planner
from strata.engine.device_plan import size_engine as size
from strata.engine.families import read_config
from strata.engine.load import served
from strata.engine.mtp_file import find_heads
from strata.engine.hop import PLACES
from strata.errors import SettingError
from strata.messages import EngineFailed, Segment, Window
from strata.request import Sampling
from strata.weights.gguf import GGUFFile
from tests.engine.running import TINY

SETTINGS = replace(Settings(model=str(TINY)), batch=2, context=300, chunk=64, spec=4)


def size_engine(settings, file, config, spans, free, packed_first=None):
    return size(settings, planner(settings, file, config), spans, free, packed_first)


@pytest.fixture(scope="module")
def opened():
    file = GGUFFile.open(TINY)
    yield file, read_config(file)
    file.close()


def test_a_large_device_holds_every_slot_and_a_small_one_what_it_can(opened):
    file, config = opened
    spans = [range(0, 2), range(2, 4)]
    facts, packed = size_engine(SETTINGS, file, config, spans, [1 << 30, 1 << 30])
    assert facts.num_pages == 2 * 5 and packed == (False, False) and facts.num_stages == 2 and facts.page_bytes == 4 * 2 * 2 * 64 * 66
    nibbles, kept = (sum(weight_bytes(file, config, span, packed) for span in spans) for packed in (False, True))
    assert kept < nibbles
    sizes = {}
    for free in range(1 << 20, 12 << 20, 1 << 15):
        try:
            facts, packed = size_engine(SETTINGS, file, config, [range(4)], [free])
        except SettingError as error:
            assert "context: one conversation of 300 tokens does not fit" in str(error) or "needs" in str(error)
            continue
        [sizes[facts.num_pages]] = packed
    assert sorted(sizes) == [5, 6, 7, 8, 9, 10] and sizes[5] and not sizes[10]  # packed where memory is short


@pytest.mark.parametrize("batch", [2, 16])
def test_what_is_refused_is_refused_with_what_would_fit(opened, batch):
    """The numbers in the refusals are right: the context named fits, the next larger does not; the auto context is that one."""
    settings = replace(SETTINGS, context=500, batch=batch)
    seen = set()
    for free in range(4 << 20, 20 << 20, 1 << 16):
        try:
            size_engine(settings, *opened, [range(4)], [free])
            continue
        except SettingError as error:
            text = str(error)
        if "model: stage 0, layers 0 to 3, needs" in text:
            needed, have = (int(number) for number in re.findall(r"needs (\d+) MiB.* and (\d+) are free", text)[0])
            assert needed >= have
            for fewer in map(int, re.findall(r"--batch (\d+) \(one page would fit\)", text)):
                assert size_engine(replace(settings, batch=fewer, context=16), *opened, [range(4)], [free])[0].num_pages >= 1
                seen.add("fewer slots for the model")
            seen.add("model")
            continue
        largest = int(re.findall(r"largest that fits is --context (\d+)", text)[0])
        assert size_engine(replace(settings, context=largest), *opened, [range(4)], [free])[0].context == largest < 500
        with pytest.raises(SettingError, match=f"--context {largest}"):
            size_engine(replace(settings, context=largest + 1), *opened, [range(4)], [free])
        assert size_engine(replace(settings, context=None), *opened, [range(4)], [free])[0].context == largest
        for fewer in map(int, re.findall(r"with --batch (\d+) one of 500 fits", text)):
            assert fewer < settings.batch and size_engine(replace(settings, batch=fewer), *opened, [range(4)], [free])[0].context == 500
            with pytest.raises(SettingError):
                size_engine(replace(settings, batch=fewer + 1), *opened, [range(4)], [free])
            seen.add("fewer")
        for each in re.findall(rf"{batch} slots have a full one each up to --context (\d+)", text):
            facts, _ = size_engine(replace(settings, context=int(each)), *opened, [range(4)], [free])
            assert facts.num_pages == batch * -(-int(each) // 64)
            seen.add("slots")
    assert seen == {"model", "fewer slots for the model", "fewer", "slots"}


def test_each_stage_keeps_the_layout_that_is_quicker_unless_memory_wants_the_smaller(opened):
    """The free memory of one stage runs down; the other one has plenty. What was chosen is what the plan then counts."""
    spans, plan = [range(0, 2), range(2, 4)], planner(SETTINGS, *opened)
    for free in range(4 << 20, 12 << 20, 1 << 17):
        try:
            facts, packed = size_engine(SETTINGS, *opened, spans, [free, 1 << 30])
        except SettingError:
            continue
        assert not packed[1], "its nibbles leave as many pages as the other stage has"
        assert min(each.pages for each in plan.stages(spans, [free, 1 << 30], 300, packed)) >= facts.num_pages
        assert packed[0] == (plan.stages(spans, [free, 1 << 30], 300, (False, False))[0].pages < facts.num_pages)
        for first in ((True, False), (False, True), (True, True)):
            both, chosen = size_engine(SETTINGS, *opened, spans, [free, 1 << 30], first)
            assert both.num_pages == facts.num_pages and chosen == (packed[0] or first[0], first[1])


def test_places_for_direct_copies_are_planned_on_the_stages_that_get_them(opened):
    plans = [planner(replace(SETTINGS, peer_copy=on), *opened) for on in (False, True)]
    first, second = ([plan.fixed_bytes(span, 300)[0] for plan in plans] for span in (range(0, 2), range(2, 4)))
    assert first[0] == first[1] and second[1] - second[0] == PLACES * 64 * opened[1].width * 4


def test_memory_for_keys_and_values_that_is_not_there_is_refused(opened):
    facts, _ = size_engine(replace(SETTINGS, kv_memory_mib=1), *opened, [range(4)], [1 << 30])
    assert facts.num_pages == (1 << 20) // facts.page_bytes
    with pytest.raises(SettingError, match="kv_memory_mib: 2000 MiB are"):
        size_engine(replace(SETTINGS, kv_memory_mib=2000), *opened, [range(4)], [1 << 30])


def test_f16_pages_take_twice_the_memory_and_f32_is_refused(opened):
    sizes = [size_engine(replace(SETTINGS, kv=kv), *opened, [range(4)], [1 << 30])[0].page_bytes for kv in ("int8", "f16")]
    assert sizes == [4 * 2 * 2 * 64 * 66, 4 * 2 * 2 * 64 * 128]
    with pytest.raises(SettingError, match="kv: f32 is not served on a device; it keeps int8 or f16"):
        size_engine(replace(SETTINGS, kv="f32"), *opened, [range(4)], [1 << 30])


@pytest.mark.parametrize("name, kv, cut, spec", [
    ("llama", "int8", 1, 1), ("llama", "f16", 1, 3), ("glm4moe", "int8", 2, 4), ("glm4moe", "int8", None, 2), ("qwen3moe", "f16", 3, 1),
])  # fmt: skip
def test_a_plan_is_what_a_stage_allocates(name, kv, cut, spec):
    """But for the graphs, and the table of magnitudes: experts, a head that drafts and its hidden rows included."""
    if find_compiler() is None:
        pytest.skip("no C++ compiler (g++ or clang++) found")
    settings = replace(SETTINGS, model=str(TINY.with_name(f"{name}-iq3s.gguf")), kv=kv, spec=spec)
    with GGUFFile.open(settings.model) as file:
        config = served(settings, file)
        spans = [range(4)] if cut is None else [range(cut), range(cut, 4)]
        devices = [EmulatedDevice() for _ in spans]
        free = [device.memory().free for device in devices]
        engine = assemble_on_devices(settings, file, config, spans, devices)
        plans = planner(settings, file, config, find_heads(settings, file, config)).stages(spans, free, 300, [False] * len(spans))
    pages = engine.facts.num_pages
    for stage, device, before, plan in zip(engine.stages, devices, free, plans):
        assert before - device.memory().free == plan.weights + plan.work + (pages + 1) * plan.page + 4 * 512
        hidden = stage.model.page_hidden
        assert stage.model.ops.pages.data.nbytes + (hidden.nbytes if hidden else 0) == (pages + 1) * plan.page
    assert engine.facts.max_rows == 2 * spec and (engine.stages[-1].model.mtp is not None) == (name == "glm4moe")
    for memory, plan in zip(engine.memory, plans, strict=True):
        assert (memory.weights, memory.kv) == (plan.weights, pages * plan.page) and memory.work == plan.work + plan.graphs


def test_a_chunk_of_more_rows_than_a_grid_has_is_refused(opened):
    with pytest.raises(SettingError, match="chunk: 65536 tokens; a device reads at most 65535 at once"):
        size_engine(replace(SETTINGS, chunk=1 << 16), *opened, [range(4)], [1 << 40])


def test_more_slots_than_rows_are_refused(opened):
    with pytest.raises(SettingError, match="batch: 40 slots"):
        size_engine(replace(SETTINGS, batch=40), *opened, [range(4)], [1 << 30])


@pytest.mark.cxx
def test_a_request_goes_through_the_pipeline(opened):
    """Two stages on two devices and one stage on one: the same greedy and the same seeded tokens."""

    def answer(spans):
        engine = assemble_on_devices(SETTINGS, *opened, spans, [EmulatedDevice() for _ in spans])
        events = queue.SimpleQueue()
        engine.start(events.put)
        tokens, positions = [[5, 9, 200, 31], [5, 9, 200, 31]], [0, 0]
        samplings = [Sampling(temperature=0.0), Sampling(temperature=0.8, seed=7, top_p=0.9)]
        for slot in (0, 1):
            segment = Segment(f"r{slot}", slot, 0, tuple(tokens[slot]), (slot,), samplings[slot])
            engine.submit(Window(slot, "prompt", 0, (segment,)))
            tokens[slot] += events.get(timeout=300).results[0].picks
        for step in range(6):
            positions = [len(one) - 1 for one in tokens]
            segments = tuple(Segment(f"r{n}", n, positions[n], (tokens[n][-1],), (n,), samplings[n]) for n in (0, 1))
            engine.submit(Window(2 + step, "decode", 0, segments))
            for one, result in zip(tokens, events.get(timeout=300).results):
                one += result.picks
        engine.close()
        return tokens

    whole = answer([range(4)])
    assert [len(one) for one in whole] == [11, 11]
    assert answer([range(1), range(1, 4)]) == whole


@pytest.mark.cxx
def test_a_window_allocates_nothing_and_waits_for_its_tokens_alone(opened, monkeypatch):
    """Greedy, seeded and penalised rows with logprobs: one wait a window, on the last stage; none for the hidden rows before it."""
    devices = [EmulatedDevice() for _ in range(2)]
    engine = assemble_on_devices(SETTINGS, *opened, [range(1), range(1, 4)], devices)
    events, waits = queue.SimpleQueue(), []
    for stage in engine.stages:
        stream = stage.model.ops.stream
        monkeypatch.setattr(stream, "synchronize", lambda stream=stream, run=stream.synchronize: (waits.append(stream), run())[1])
    engine.start(events.put)
    samplings = [Sampling(temperature=0.0, logprobs=2), Sampling(seed=7, repetition_penalty=1.2, logprobs=0)]
    history = ((5, 9, 200), [31])
    for step in range(4):
        segments = tuple(Segment(f"r{n}", n, step, (9 + n,), (n,), samplings[n], history=history) for n in (0, 1))
        engine.submit(Window(step, "decode", 0, segments))
        assert not isinstance(events.get(timeout=300), EngineFailed)
        if step == 0:
            free = [device.memory().free for device in devices]
    engine.close()
    assert [device.memory().free for device in devices] == free
    assert waits == [engine.stages[1].model.ops.stream] * 4
