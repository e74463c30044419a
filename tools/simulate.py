"""The slot machine under a virtual clock: what a slot rule is worth on a pipelined rig, and whom a side request displaces.

    python tools/simulate.py                the table of four stages and eight slots, beside the measured one
    python tools/simulate.py --fit          look for the stage costs that come nearest to the measured table
    python tools/simulate.py --side         conversations A and B, a side request, and their next turns
    python tools/simulate.py --chunks       a long prompt read beside decoders on four stages, by the share that the decoders keep
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strata.messages import EngineFacts, NewTokens, RequestEvent  # noqa: E402
from strata.request import Placement, Request, Sampling  # noqa: E402
from strata.slots import SlotPolicy  # noqa: E402
from strata.slots.events import Cancel  # noqa: E402
from tools._simulation import Costs, Outcome, World  # noqa: E402

MEASURED = {2: ((130, 138), (153, 168)), 3: ((185, 209), (230, 238)), 4: ((239, 245), (263, 270)), 8: ((388, 391), (387, 395))}
"""Total tokens/s of the original on four cards: clients -> (rule of 0.1.40.2, lowest free slot first), two runs each."""

FITTED = Costs(
    fixed=0.239e-3, per_row=0.947e-3, hop=0.247e-3, host=0.56e-3, host_per_row=0.36e-3, chunk_fixed=6.8e-3, per_token=0.1e-3,
)
"""One set of costs for the whole table, found by --fit; what they mean is said in docs/BATCHING.md."""

Rows = Literal["compact", "prefix"]


def run_clients(clients: int, low_first: bool, rows: Rows, costs: Costs, seed: int, tokens: int = 300) -> float:
    """Total tokens/s of ``clients`` that send three requests each, from a random order of last use of the slots."""
    facts = EngineFacts(num_pages=4000, page_tokens=16, context=2048, chunk=512, num_stages=4)
    world = World(facts, SlotPolicy(slots=8, groups=4, rows=rows, low_first=low_first), costs)
    order = random.Random(seed).sample(range(8), 8)
    for slot in world.machine.slots:
        slot.used = -1.0 - order[slot.id]
    # The pipelined slots of that version kept no conversation.
    placement = Placement(reuse=False, keep=False)

    def send(client: int, number: int) -> None:
        def on_end(outcome: Outcome) -> None:
            if number < 3:
                send(client, number + 1)

        request = Request(f"{client}.{number}", (client,) * 20, tokens, Sampling(), placement=placement)
        world.ask(request, lambda place: 0, on_end)

    for client in range(clients):
        send(client, 1)
    world.clock.run()
    return clients * 3 * tokens / world.clock.now


def table(costs: Costs, orders: int, tokens: int, arms: Sequence[tuple[bool, Rows]]) -> dict[int, list[float]]:
    """Mean tokens/s of every arm at 2, 3, 4 and 8 clients over ``orders`` starting orders."""
    return {
        clients: [statistics.fmean(run_clients(clients, low, rows, costs, seed, tokens) for seed in range(orders)) for low, rows in arms]
        for clients in MEASURED
    }


ARMS: tuple[tuple[bool, Rows], ...] = ((False, "prefix"), (True, "prefix"), (False, "compact"), (True, "compact"))


def measured_gain(clients: int) -> float:
    old, new = (statistics.fmean(runs) for runs in MEASURED[clients])
    return (new / old - 1) * 100


def show_table(costs: Costs, orders: int) -> None:
    print(f"costs in ms: {({name: round(value * 1e3, 3) for name, value in vars(costs).items() if value})}; {orders} starting orders\n")
    print("| clients | measured | prefix, old rule | prefix, low first | gain measured | gain | residual | compact, old | compact, low |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    summary = {}
    for clients, (old, low, compact_old, compact_low) in table(costs, orders, 300, ARMS).items():
        was, now = (statistics.fmean(runs) for runs in MEASURED[clients])
        gain, measured = (low / old - 1) * 100, measured_gain(clients)
        print(
            f"| {clients} | {was:.0f} / {now:.0f} | {old:.0f} | {low:.0f} | {measured:+.0f} % | {gain:+.1f} % | {gain - measured:+.1f} | "
            f"{compact_old:.0f} | {compact_low:.0f} |"
        )
        summary[clients] = {"old": round(old, 1), "low_first": round(low, 1), "gain": round(gain, 1), "compact": round(compact_low, 1)}
    print(json.dumps({"simulate": "slot choice", "orders": orders, "clients": summary}))


def misfit(costs: Costs, orders: int, tokens: int) -> float:
    """Squared relative errors of the eight figures, and of the four gains with the weight that the goal gives them."""
    total = 0.0
    for clients, (old, low) in table(costs, orders, tokens, ARMS[:2]).items():
        was, now = (statistics.fmean(runs) for runs in MEASURED[clients])
        total += (old / was - 1) ** 2 + (low / now - 1) ** 2 + 4 * ((low / old) - (now / was)) ** 2
    return total


def fit(costs: Costs, orders: int, tokens: int) -> Costs:
    """Coordinate descent over the costs that matter, with steps that shrink."""
    best, step = misfit(costs, orders, tokens), 0.3
    while step > 0.02:
        improved = False
        for name in ("fixed", "per_row", "hop", "host", "host_per_row", "chunk_fixed"):
            for factor in (1 + step, 1 / (1 + step)):
                trial = replace(costs, **{name: getattr(costs, name) * factor})
                value = misfit(trial, orders, tokens)
                if value < best:
                    best, costs, improved = value, trial, True
                    print(f"misfit {best:.4f}: {costs}", flush=True)
        step = step if improved else step / 2
    return costs


# ---- A, B, and the side request


SIDE_COSTS = Costs(fixed=12e-3, per_row=2e-3, chunk_fixed=20e-3, per_token=0.31e-3, copy=0.05e-3)
"""One card: 40,250 tokens read in 12.7 s beside a decoding stream."""

A_TOKENS, B_TOKENS = 40_250, 1_781


def side_request(policy: SlotPolicy) -> dict[str, tuple[str, int, float]]:
    """Who lost its slot to the side request, and per next turn: (slot, tokens read, seconds to the first token)."""
    facts = EngineFacts(num_pages=3000, page_tokens=64, context=65_536, page_bytes=1 << 20, chunk=2048, prompt_grid=64)
    world = World(facts, policy, SIDE_COSTS)
    texts = {"A": tuple(range(A_TOKENS)), "B": tuple(range(100_000, 100_000 + B_TOKENS)), "side": tuple(range(7, 37))}
    seen: dict[str, tuple[str, int, float]] = {}

    def ask(name: str, prompt: tuple[int, ...], then: Callable[[], None]) -> None:
        def on_end(outcome: Outcome) -> None:
            usage, base = outcome.end.usage, name.split()[0]  # type: ignore[union-attr]
            first = (outcome.first or 0.0) - outcome.sent
            seen[name] = f"slot {outcome.end.slot}", usage.prompt - usage.cached, first  # type: ignore[union-attr]
            texts[base] = prompt + tuple(outcome.tokens) + tuple(range(9000, 9020))
            world.clock.after(5.0, then)

        world.ask(Request(name, prompt, 100, Sampling()), lambda place: 50 + place, on_end)

    steps = ["A", "B", "side", "A next", "B next"]

    def go(place: int) -> None:
        if place < len(steps):
            ask(steps[place], texts[steps[place].split()[0]], lambda: go(place + 1))

    world.ask(Request("stream", (1, 2, 3), 20_000, Sampling()), lambda place: 3, lambda outcome: None)
    go(0)
    world.clock.run()
    return seen


def show_side() -> None:
    print("| shelf | parking | `STRATA_SLOT_EXPIRE_S` | side request takes | A's next turn reads | after | B's next turn reads | after |")
    print("| --- | --- | --- | --- | ---: | ---: | ---: | ---: |")
    rows = []
    for shelf, cache in ((False, 0), (False, 1 << 32), (True, 0)):
        for expire in (600.0, 0.0, None):
            seen = side_request(SlotPolicy(slots=3, groups=1, shelf=shelf, cache_bytes=cache, expire_s=expire or 0.0))
            loser = next(name for name in "AB" if seen[name][0] == seen["side"][0])
            a, b = seen["A next"], seen["B next"]
            setting = "unset" if expire is None else f"{expire:.0f}"
            print(
                f"| {'on' if shelf else 'off'} | {'on' if cache else 'off'} | {setting} | {loser}'s slot | "
                f"{a[1]:,} | {a[2]:.2f} s | {b[1]:,} | {b[2]:.2f} s |"
            )
            rows.append({"shelf": shelf, "parking": bool(cache), "expire": setting, "loser": loser, "A_reads": a[1], "A_s": round(a[2], 2)})
    print(json.dumps({"simulate": "side request", "rows": rows}))


# ---- a long prompt beside decoders


CHUNK_COSTS = Costs(fixed=3e-3, per_row=0.5e-3, chunk_fixed=5e-3, per_token=0.0775e-3)
"""The card above, cut in four: a window costs each stage a quarter."""

LONG = 32_768


def read_beside(decoders: int, share: float, stages: int = 4) -> tuple[float, float, float]:
    """Seconds until a long prompt's first token, the decoders' tokens/s meanwhile, and the longest that one of them waited for a token."""
    facts = EngineFacts(num_pages=8000, page_tokens=64, context=65_536, chunk=2048, prompt_grid=64, num_stages=stages)
    world = World(facts, SlotPolicy(slots=8, groups=stages, decode_share=share), CHUNK_COSTS)
    times: dict[str, list[float]] = {f"{number}": [] for number in range(decoders)}
    tell, read = world._tell, [0.0, 0.0]

    def overhear(event: RequestEvent) -> None:
        if isinstance(event, NewTokens) and event.request_id in times:
            times[event.request_id].append(world.clock.now)
        tell(event)

    def ended(outcome: Outcome) -> None:
        read[:] = outcome.sent, outcome.first or 0.0
        for name in times:
            world.feed(Cancel(name))

    world._tell = overhear  # type: ignore[method-assign]
    for name in times:
        world.ask(Request(name, (int(name),) * 20, 50_000, Sampling()), lambda place: 0, lambda outcome: None)
    world.clock.after(5.0, lambda: world.ask(Request("long", tuple(range(LONG)), 1, Sampling()), lambda place: 0, ended))
    world.clock.run()
    sent, first = read
    inside = [[sent, *(at for at in one if sent <= at <= first), first] for one in times.values()]
    gap = max((after - before for one in inside for before, after in zip(one, one[1:])), default=0.0)
    return first - sent, sum(len(one) - 2 for one in inside) / (first - sent), gap


def show_chunks() -> None:
    alone, chunk = read_beside(0, 0.5)[0], CHUNK_COSTS.chunk_fixed + 2048 * CHUNK_COSTS.per_token
    print(f"{LONG:,} tokens in chunks of 2,048 on four stages, {1e3 * chunk:.0f} ms for each on each; with nobody decoding {alone:.1f} s\n")
    print("| decoders | share | first token after | decoders' tokens/s | longest gap |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    rows = []
    for decoders in (1, 4):
        for share in (0.0, 0.25, 0.5, 0.75):
            seconds, rate, gap = read_beside(decoders, share)
            print(f"| {decoders} | {share} | {seconds:.1f} s | {rate:.1f} | {gap:.2f} s |")
            figures = {"first_s": round(seconds, 2), "tokens_s": round(rate, 1), "gap_s": round(gap, 3)}
            rows.append({"decoders": decoders, "share": share, **figures})
    print(json.dumps({"simulate": "chunks", "alone_s": round(alone, 2), "rows": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the stage costs to the measured table")
    parser.add_argument("--side", action="store_true", help="conversations A and B and a side request")
    parser.add_argument("--chunks", action="store_true", help="a long prompt beside decoders on four stages")
    parser.add_argument("--orders", type=int, default=50, help="random starting orders of last use")
    options = parser.parse_args()
    if options.side:
        show_side()
    elif options.chunks:
        show_chunks()
    elif options.fit:
        show_table(fit(FITTED, 6, 60), options.orders)
    else:
        show_table(FITTED, options.orders)


if __name__ == "__main__":
    main()
