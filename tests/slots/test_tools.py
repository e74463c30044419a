"""The tools around the machine: the picture of the tables, the simulation, the replay of traces."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from strata.messages import EngineFacts
from strata.request import Request, Sampling
from strata.slots import SlotPolicy
from tests.slots.house import House
from tools import draw_states, replay, simulate, simulate_drafts
from tools._simulation import Costs, World

DATA = Path(__file__).parent.parent / "data" / "traces"


def test_the_picture_in_docs_is_what_the_tables_say() -> None:
    assert draw_states.PICTURE.read_text(encoding="utf-8") == draw_states.picture(), "run python tools/draw_states.py"


def test_a_lone_window_takes_the_sum_of_its_stages() -> None:
    facts = EngineFacts(num_pages=100, page_tokens=4, context=100, num_stages=3)
    world = World(facts, SlotPolicy(slots=2), Costs(fixed=2.0, per_row=1.0, hop=0.5, host=0.25, chunk_fixed=4.0))
    ends: list[float] = []
    world.ask(Request("a", (1, 2, 3), 3, Sampling()), lambda place: place, lambda outcome: ends.append(outcome.finished))
    world.clock.run()
    chunk, window = 3 * (4.0 + 0.25) + 2 * 0.5, 3 * (2.0 + 1.0 + 0.25) + 2 * 0.5
    assert ends == [pytest.approx(chunk + 2 * window)]


def test_stages_work_at_the_same_time_and_the_host_does_not() -> None:
    facts = EngineFacts(num_pages=100, page_tokens=4, context=100, num_stages=2)
    seconds = []
    for host in (0.0, 1.0):
        world = World(facts, SlotPolicy(slots=2, groups=2), Costs(fixed=1.0, per_row=0.0, host=host))
        for name in "ab":
            world.ask(Request(name, (ord(name),), 40, Sampling()), lambda place: place, lambda outcome: None)
        world.clock.run()
        seconds.append(world.clock.now / 78)
    assert seconds[0] == pytest.approx(1.0, rel=0.05), "two groups on two stages: a window leaves every second"
    assert seconds[1] > 2.0, "the host is needed twice for each"


def test_the_rule_is_worth_what_was_measured_and_compact_windows_are_never_slower() -> None:
    found = simulate.table(simulate.FITTED, 4, 100, simulate.ARMS)
    for clients, (old, low, compact_old, compact_low) in found.items():
        gain = (low / old - 1) * 100
        assert abs(gain - simulate.measured_gain(clients)) < 12, f"{clients} clients (four orders only, so twice the goal)"
        assert min(compact_old, compact_low) >= 0.999 * max(old, low)


@pytest.mark.parametrize(("clients", "right"), [(1, 0.1), (1, 0.8), (2, 0.5), (8, 0.1), (8, 0.8)])
def test_chosen_drafts_are_about_as_good_as_the_best_fixed_number_and_never_lose(clients: int, right: float) -> None:
    gain = simulate_drafts.speed(clients, right, 4) / simulate_drafts.speed(clients, right, 1)
    best, _ = simulate_drafts.best_fixed(clients, right)
    assert gain >= 0.97 and 0.95 * best <= gain <= 1.05 * best


def test_the_side_request_takes_a_s_slot_unless_expiry_or_shelf_says_otherwise() -> None:
    plain = simulate.side_request(SlotPolicy(slots=3, shelf=False))
    assert plain["side"][0] == plain["A"][0] and plain["A next"][1] > simulate.A_TOKENS
    expiring = simulate.side_request(SlotPolicy(slots=3, shelf=False, expire_s=600.0))
    assert expiring["side"][0] == expiring["B"][0] and expiring["A next"][1] < 30 and expiring["B next"][1] > simulate.B_TOKENS
    shelved = simulate.side_request(SlotPolicy(slots=3))
    assert shelved["A next"][1] < 30 and shelved["B next"][1] < 30


def test_a_mooncake_trace_shares_its_blocks() -> None:
    visits = replay.read(DATA / "mooncake.jsonl", replay.Maker(64))
    rows = [json.loads(line) for line in (DATA / "mooncake.jsonl").read_text().splitlines()]
    assert len(visits) == len(rows) > 50
    for visit, row in zip(visits, rows):
        assert len(visit.prompt) == -(-row["input_length"] // 64)
    assert visits[0].prompt[:8] == visits[1].prompt[:8], "block 0 is everybody's"
    sessions = [visit.session for visit in visits]
    assert len(set(sessions)) < len(sessions), "some come back"


def test_an_azure_trace_shares_nothing() -> None:
    visits = replay.read(DATA / "azure.csv", replay.Maker(64))
    assert len({token for visit in visits for token in visit.prompt}) == sum(len(visit.prompt) for visit in visits)
    assert visits[1].time == pytest.approx(0.052)


def test_sharing_and_shelf_read_less() -> None:
    visits = replay.read(DATA / "mooncake.jsonl", replay.Maker(64))
    facts = EngineFacts(4 * 2048 // 8, 8, 2048, page_bytes=1, chunk=32)
    costs = Costs(0.7, 0.1, per_token=0.02)
    found = {rule.name: replay.replay(visits, rule, facts, costs, 1.0, 64) for rule in replay.rules(4, 600.0, 2000)}
    assert len({tally.prompt for tally in found.values()}) == 1
    plain, best = found["as the original"], found["+ sharing, shelf, parking"]
    assert best.read < found["+ sharing"].read < plain.read
    assert best.hit_share > 0.2 and best.evicted < plain.evicted


def test_our_own_trace_replays_what_was_shared(tmp_path: Path) -> None:
    house = House()
    house.chat("a", tuple(range(40)), max_tokens=8)
    house.now += 5
    house.chat("a2", tuple(range(40)) + tuple(house.tokens["a"]) + (1, 2, 3, 4), max_tokens=8)
    house.now += 5
    house.chat("b", tuple(range(20)) + (9,) * 12, max_tokens=8)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(dataclasses.asdict(trace)) for trace in house.traces))
    visits = replay.read(path, replay.Maker(1))
    tally = replay.replay(visits, replay.Rule("all", SlotPolicy(slots=4)), house.facts, Costs(0.01, 0.0), 1.0, 1)
    cached = sum(trace.cached for trace in house.traces)
    assert tally.prompt - tally.read == cached == 47 + 20


def test_a_file_of_no_known_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("hello\n")
    with pytest.raises(SystemExit, match="neither Mooncake"):
        replay.read(path, replay.Maker(64))


def test_decoders_keep_their_share_beside_a_long_prompt_and_give_it_up_for_overlapping_chunks() -> None:
    """One chunk at a time: nobody waits for more than a chunk on every stage and a few windows. Share 0: all stages read at once."""
    chunk = 4 * (simulate.CHUNK_COSTS.chunk_fixed + 2048 * simulate.CHUNK_COSTS.per_token)
    alone, _, _ = simulate.read_beside(0, 0.5)
    overlapped, few, long_gap = simulate.read_beside(1, 0.0)
    shared, many, gap = simulate.read_beside(1, 0.5)
    assert alone == pytest.approx((16 + 3) * chunk / 4, rel=0.01) and overlapped < 1.05 * alone
    assert abs(gap - chunk) < 0.02 and long_gap > 1.5 * chunk
    assert shared == pytest.approx(16 * 1.5 * chunk, rel=0.05) and many > 15 * few
