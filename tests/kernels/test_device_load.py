"""An engine on devices: what fits by the plan, and a request through the real pipeline."""

import queue
from dataclasses import replace

import pytest

from strata.config import Settings
from strata.devices.emulated import EmulatedDevice
from strata.engine.device_load import assemble_on_devices, size_engine, weight_bytes
from strata.engine.families import read_config
from strata.errors import SettingError
from strata.messages import Sampling, Segment, Window
from strata.weights.gguf import GGUFFile
from tests.engine.running import TINY

SETTINGS = replace(Settings(model=str(TINY)), batch=2, context=300, chunk=64)


@pytest.fixture(scope="module")
def opened():
    file = GGUFFile.open(TINY)
    yield file, read_config(file)
    file.close()


def test_a_large_device_holds_every_slot_and_a_small_one_what_it_can(opened):
    file, config = opened
    spans = [range(0, 2), range(2, 4)]
    facts, packed = size_engine(SETTINGS, file, config, spans, [1 << 30, 1 << 30])
    assert facts.num_pages == 2 * 5 and not packed and facts.num_stages == 2 and facts.page_bytes == 4 * 2 * 2 * 64 * 66
    nibbles, kept = (sum(weight_bytes(file, config, span, packed) for span in spans) for packed in (False, True))
    assert kept < nibbles
    sizes = {}
    for free in range(1 << 20, 4 << 20, 1 << 15):
        try:
            facts, packed = size_engine(SETTINGS, file, config, [range(4)], [free])
        except SettingError as error:
            assert "context: one conversation of 300 tokens needs 5 pages" in str(error)
            continue
        sizes[facts.num_pages] = packed
    assert sorted(sizes) == [5, 6, 7, 8, 9, 10] and sizes[5] and not sizes[10]  # packed where memory is short


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
            tokens[slot] += events.get(timeout=60).results[0].picks
        for step in range(6):
            positions = [len(one) - 1 for one in tokens]
            segments = tuple(Segment(f"r{n}", n, positions[n], (tokens[n][-1],), (n,), samplings[n]) for n in (0, 1))
            engine.submit(Window(2 + step, "decode", 0, segments))
            for one, result in zip(tokens, events.get(timeout=60).results):
                one += result.picks
        engine.close()
        return tokens

    whole = answer([range(4)])
    assert [len(one) for one in whole] == [11, 11]
    assert answer([range(1), range(1, 4)]) == whole
