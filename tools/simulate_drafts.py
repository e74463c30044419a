"""The slot machine under a virtual clock: what its choice of drafts is worth, beside the best fixed number of them.

    python tools/simulate_drafts.py

A head that is right with a given chance at every place of an answer, 1 to 8 clients of three answers each, ``--spec 4``. The server is
fresh: what is tried before anything is known is part of the figures. Prints a table and one JSON line.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strata.messages import DraftLimits, DraftSource, EngineFacts, Tokens  # noqa: E402
from strata.request import Request, Sampling  # noqa: E402
from strata.slots import SlotPolicy  # noqa: E402
from tools._simulation import Costs, Drafter, Outcome, World  # noqa: E402

COSTS = Costs(fixed=18e-3, per_row=2e-3, chunk_fixed=20e-3, head=1.3e-3)
"""A row costs a tenth of a window of one row, a step of the head 0.065 of it: a small model on a processor."""
SPEC, ANSWERS, TOKENS = 4, 3, 400


def guess(right: float) -> Drafter:
    """A head that is right with this chance at every place."""

    def draft(outcome: Outcome, number: int, limits: DraftLimits) -> tuple[Tokens, DraftSource]:
        places = range(number, number + limits.mtp)
        drafts = tuple(outcome.token(at) + (random.Random(f"{outcome.request.id} {at}").random() >= right) for at in places)
        return drafts, "mtp" if drafts else ""

    return draft


def speed(clients: int, right: float, spec: int, costs: Costs = COSTS) -> float:
    """Tokens/s."""
    sources: tuple[DraftSource, ...] = ("mtp",) if spec > 1 else ()
    facts = EngineFacts(num_pages=4000, page_tokens=16, context=2048, chunk=512, max_drafts=spec - 1, draft_sources=sources)
    world = World(facts, SlotPolicy(slots=8), costs, guess(right))

    def send(client: int, number: int) -> None:
        request = Request(f"{client}.{number}", (client,) * 20, TOKENS, Sampling())
        world.ask(request, lambda place: place, lambda outcome: send(client, number + 1) if number < ANSWERS else None)

    for client in range(clients):
        send(client, 1)
    world.clock.run()
    return clients * ANSWERS * TOKENS / world.clock.now


def best_fixed(clients: int, right: float, costs: Costs = COSTS) -> tuple[float, int]:
    """What the best fixed number of drafts brings by the formula of drafting.py, in relation to none; and that number."""
    none = costs.fixed + costs.per_row * clients
    return max(
        (sum(right ** place for place in range(count + 1)) * none / (none + (costs.per_row * clients + costs.head) * count), count)
        for count in range(SPEC)
    )


def main() -> None:
    print(f"costs in ms: {({name: round(value * 1e3, 3) for name, value in vars(COSTS).items() if value})}; --spec {SPEC}\n")
    print("| clients | drafts that are right | tokens/s without | with | gain | best fixed number | its gain |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    rows = []
    for clients in (1, 2, 4, 8):
        for right in (0.1, 0.5, 0.8):
            without, chosen = speed(clients, right, 1), speed(clients, right, SPEC)
            best, count = best_fixed(clients, right)
            print(f"| {clients} | {right:.0%} | {without:.0f} | {chosen:.0f} | {chosen / without - 1:+.0%} | {count} | {best - 1:+.0%} |")
            rows.append({"clients": clients, "right": right, "gain": round(chosen / without, 3), "best": round(best, 3)})
    print(json.dumps({"simulate": "drafts", "spec": SPEC, "rows": rows}))


if __name__ == "__main__":
    main()
