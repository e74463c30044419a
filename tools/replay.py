"""A recorded day through the slot machine: how many prompt tokens each rule has to read, and who is evicted.

    python tools/replay.py mooncake_conversation.jsonl --every 40
    python tools/replay.py azure_code_2023.csv --slots 4
    python tools/replay.py our-own-trace.jsonl

Formats, told apart by their fields: Mooncake JSONL (``timestamp`` ms, ``input_length``, ``output_length``, ``hash_ids`` of 512-token
blocks), Azure CSV (times and counts only: nothing in it can be shared), and our own JSONL, one ``strata.slots.events.Trace`` per line
as an object. No format has text: tokens are made up so that exactly what was shared is shared.

The trace is replayed in units of ``--unit`` tokens, by the production machine under a virtual clock, with one stage whose costs are
those of ``--prompt-rate`` and ``--window-ms``. Every rule sees the same requests at the same times.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strata.errors import ClientError  # noqa: E402
from strata.messages import EngineFacts, Tokens  # noqa: E402
from strata.request import Placement, Request, Sampling  # noqa: E402
from strata.slots import SlotPolicy  # noqa: E402
from tools._simulation import Costs, Outcome, World  # noqa: E402

BLOCK = 512
FRESH = 1 << 30
"""Made-up ids start here, above every id that stands for a block."""


@dataclass(frozen=True)
class Visit:
    """One request of a trace, in units. ``session``: who it belongs to, for rules under which sessions share nothing."""

    time: float
    prompt: Tokens
    anchor: int
    answer: int
    session: str


class Maker:
    """Makes tokens that nobody else has."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self._last = FRESH

    def fresh(self, count: int) -> Tokens:
        first = self._last
        self._last += count
        return tuple(range(first, self._last))

    def units(self, tokens: int) -> int:
        return max(1, -(-tokens // self.unit))


def read_mooncake(path: Path, maker: Maker) -> Iterator[Visit]:
    """A block's id stands for all text up to its end, so the last full block of an earlier prompt names the session it continues."""
    size, sessions = BLOCK // maker.unit, dict[int, str]()
    with path.open() as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            blocks, full = row["hash_ids"], row["input_length"] // BLOCK
            units = maker.units(row["input_length"])
            prompt = tuple(block * size + place for block in blocks for place in range(size))[:units]
            # One block is a system prompt that everybody has; a conversation begins after it.
            known = [block for block in reversed(blocks[1:full]) if block in sessions]
            session = sessions[known[0]] if known else str(number)
            if full > 1:
                sessions[blocks[full - 1]] = session
            anchor = full * size if full > 1 else units - 1
            yield Visit(row["timestamp"] / 1000, prompt, anchor, maker.units(row["output_length"]), session)


def read_azure(path: Path, maker: Maker) -> Iterator[Visit]:
    with path.open(newline="") as lines:
        start: datetime | None = None
        for number, row in enumerate(csv.DictReader(lines)):
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or when
            units = maker.units(int(row["ContextTokens"]))
            answer = maker.units(int(row["GeneratedTokens"]))
            yield Visit((when - start).total_seconds(), maker.fresh(units), units - 1, answer, str(number))


def read_own(path: Path, maker: Maker) -> Iterator[Visit]:
    """``shared`` tokens of the parent's text as it was then, the rest fresh; answers are what the replay will generate."""
    texts: dict[int, Tokens] = {}
    with path.open() as lines:
        rows = sorted((json.loads(line) for line in lines), key=lambda row: float(row["arrived"]))
    for row in rows:
        units, shared = maker.units(row["prompt"]), row["shared"] // maker.unit
        begin = texts.get(row["parent"], ())[:min(shared, units)]
        prompt = begin + maker.fresh(units - len(begin))
        answer = maker.units(row["generated"])
        visit = Visit(row["arrived"] - rows[0]["arrived"], prompt, units - 1, answer, str(row["conversation"]))
        texts[row["conversation"]] = prompt + answer_of(prompt, answer)
        yield visit


def answer_of(prompt: Tokens, count: int) -> Tokens:
    """The made-up answer to ``prompt``: negative ids, so that it equals no prompt, and always the same."""
    base = -(hash(prompt) % (1 << 29)) - count - 1
    return tuple(base - place for place in range(count))


def read(path: Path, maker: Maker) -> list[Visit]:
    """The whole trace, in order of time. Raises ``SystemExit`` with one line where it is of no known format."""
    with path.open() as lines:
        head = lines.readline()
    if "hash_ids" in head:
        return list(read_mooncake(path, maker))
    if "ContextTokens" in head:
        return list(read_azure(path, maker))
    if '"conversation"' in head and '"shared"' in head:
        return list(read_own(path, maker))
    raise SystemExit(f"error: {path}: neither Mooncake JSONL, nor Azure CSV, nor a trace of this server")


@dataclass(frozen=True)
class Rule:
    """A way to run the machine. ``share``: sessions may borrow from each other."""

    name: str
    policy: SlotPolicy
    share: bool = True


def rules(slots: int, expire: float, cache_pages: int) -> list[Rule]:
    """The original (no shelf, no cache, no sharing), then one thing after the other switched on."""
    plain = SlotPolicy(slots=slots, groups=1, queue_limit=1 << 30, shelf=False)
    expiring, parking = replace(plain, expire_s=expire), replace(plain, cache_bytes=cache_pages)
    return [
        Rule("as the original", plain, share=False),
        Rule("+ expiry", expiring, share=False),
        Rule("+ sharing", plain),
        Rule("+ sharing, expiry", expiring),
        Rule("+ sharing, parking", parking),
        Rule("+ sharing, parking, expiry", replace(parking, expire_s=expire)),
        Rule("+ sharing, shelf", replace(plain, shelf=True)),
        Rule("+ sharing, shelf, expiry", replace(expiring, shelf=True)),
        Rule("+ sharing, shelf, parking", replace(parking, shelf=True)),
    ]


@dataclass
class Tally:
    """What a replay came to, in tokens and seconds."""

    prompt: int = 0
    read: int = 0
    refused: int = 0
    evicted: int = 0
    parked: int = 0
    restored: int = 0
    waits: list[float] = None  # type: ignore[assignment]

    def add(self, other: Tally) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def hit_share(self) -> float:
        return 1 - self.read / self.prompt if self.prompt else 0.0


def replay(visits: Sequence[Visit], rule: Rule, facts: EngineFacts, costs: Costs, stretch: float, unit: int) -> Tally:
    """All visits through one machine."""
    world, tally = World(facts, rule.policy, costs), Tally(waits=[])

    def arrive(number: int) -> None:
        visit = visits[number]
        answer = answer_of(visit.prompt, visit.answer)
        tenant = "" if rule.share else visit.session
        request = Request(
            str(number), visit.prompt, visit.answer, Sampling(), turn_marks=(visit.anchor,), placement=Placement(tenant=tenant),
        )
        try:
            world.ask(request, lambda place: answer[place], on_end)
        except ClientError:
            tally.refused += 1

    def on_end(outcome: Outcome) -> None:
        assert outcome.end is not None
        usage = outcome.end.usage
        tally.prompt += usage.prompt * unit
        tally.read += (usage.prompt - usage.cached) * unit
        if outcome.first is not None:
            tally.waits.append(outcome.first - outcome.sent)

    for number, visit in enumerate(visits):
        world.clock.at(visit.time * stretch, lambda number=number: arrive(number))  # type: ignore[misc]
    world.clock.run()
    world.machine.check_integrity()
    counters = world.machine.counters
    tally.evicted, tally.parked, tally.restored = sum(counters.evictions.values()), counters.parked, counters.restored
    return tally


def samples(visits: list[Visit], every: int, count: int) -> list[list[Visit]]:
    """``count`` small crowds out of a large one: every ``every``-th session, whole and at its own times."""
    if every <= 1:
        return [visits]
    order = {session: number for number, session in enumerate(dict.fromkeys(visit.session for visit in visits))}
    return [[visit for visit in visits if order[visit.session] % every == first] for first in range(min(count, every))]


def setting(options: argparse.Namespace, slots: int) -> tuple[EngineFacts, Costs]:
    """The machine's engine in units: pages of one block, a pool of one context per slot."""
    unit = options.unit
    page, context = max(1, BLOCK // unit), options.context // unit
    facts = EngineFacts(slots * context // page, page, context, page_bytes=1, prompt_grid=1, chunk=max(1, 2048 // unit), max_rows=64)
    window, per_row = options.window_ms / 1000, options.row_ms / 1000
    costs = Costs(window * unit, per_row * unit, per_token=unit / options.prompt_rate, copy=page * unit / options.copy_rate)
    return facts, costs


def show(options: argparse.Namespace) -> None:
    crowds = samples(read(options.trace, Maker(options.unit))[:options.limit], options.every, options.samples)
    requests = sum(map(len, crowds))
    hours = sum(visits[-1].time for visits in crowds) * options.stretch / 3600
    sessions = sum(len({visit.session for visit in visits}) for visits in crowds)
    crowd = f"{len(crowds)} crowds (every {options.every}th session)" if options.every > 1 else "every session"
    print(f"{options.trace.name}: {requests} requests of {sessions} sessions, {crowd}, {hours:.1f} h\n")
    print("| slots | rule | prompt tokens read | hit share | fewer than the original | histories lost | parked / back | "
          "first token: median / p90 |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    found = []
    for slots in options.slots:
        facts, costs = setting(options, slots)
        base = 0
        for rule in rules(slots, options.expire, options.cache // options.unit // facts.page_tokens):
            tally = Tally(waits=[])
            for visits in crowds:
                tally.add(replay(visits, rule, facts, costs, options.stretch, options.unit))
            base = base or tally.read
            fewer = 1 - tally.read / base
            waits = sorted(tally.waits)
            print(
                f"| {slots} | {rule.name} | {tally.read / 1e6:.2f} M | {tally.hit_share:.1%} | {fewer:.1%} | {tally.evicted:,} | "
                f"{tally.parked:,} / {tally.restored:,} | {statistics.median(waits):.1f} / {waits[len(waits) * 9 // 10]:.1f} s |",
                flush=True,
            )
            found.append({
                "slots": slots, "rule": rule.name, "read": tally.read, "hit_share": round(tally.hit_share, 4), "fewer": round(fewer, 4),
                "evicted": tally.evicted, "refused": tally.refused,
            })
    setting_of = {"requests": requests, "every": options.every, "stretch": options.stretch}
    print(json.dumps({"replay": options.trace.name, **setting_of, "rules": found}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--slots", type=lambda text: [int(part) for part in text.split(",")], default=[4, 6, 8], help="in turn (4,6,8)")
    parser.add_argument("--expire", type=float, default=600.0, help="STRATA_SLOT_EXPIRE_S of the rules with expiry")
    parser.add_argument("--stretch", type=float, default=1.0, help="multiply the trace's times")
    parser.add_argument("--every", type=int, default=1, help="every Nth session: a cluster's crowd is too large for one machine")
    parser.add_argument("--samples", type=int, default=4, help="how many such crowds, each on a machine of its own")
    parser.add_argument("--limit", type=int, default=None, help="only the first requests")
    parser.add_argument("--unit", type=int, default=64, choices=[1 << bit for bit in range(10)], help="tokens per simulated token")
    parser.add_argument("--context", type=int, default=131_072, help="tokens; the pool holds this much per slot")
    parser.add_argument("--cache", type=int, default=1_000_000, help="tokens that host memory can park")
    parser.add_argument("--prompt-rate", type=float, default=3170.0, help="prompt tokens/s")
    parser.add_argument("--window-ms", type=float, default=12.0, help="fixed time of a decode window")
    parser.add_argument("--row-ms", type=float, default=2.0, help="and per row")
    parser.add_argument("--copy-rate", type=float, default=200_000.0, help="tokens/s to and from host memory")
    show(parser.parse_args())


if __name__ == "__main__":
    main()
