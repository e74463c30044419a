"""What one event costs the slot machine: N slots that all hold long histories, next turns and strangers arriving, M answers running.

Nothing is computed: windows report at once with made-up tokens, so all time measured (CPU time of the thread) is the machine's.
With ``--drafts`` every window also brings drafts, half of which turn out right. Prints a table by kind of event, and one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strata.messages import EngineFacts, Finished, Segment, SegmentResult, Window, WindowDone  # noqa: E402
from strata.request import Request, Sampling  # noqa: E402
from strata.slots import SlotMachine, SlotPolicy, pack  # noqa: E402
from strata.slots.events import Arrive  # noqa: E402


class Bench:
    """A machine, an engine that takes no time, and a stopwatch around ``receive``."""

    def __init__(self, slots: int, tokens: int, groups: int, drafts: int) -> None:
        pages = (slots + 4) * (tokens + 8000) // 64
        sources = ("mtp", "lookup") if drafts else ()
        self.facts = EngineFacts(
            pages, 64, tokens + 100_000, 1 << 20, prompt_grid=128, chunk=2048, max_drafts=drafts, draft_sources=sources,
        )
        self.machine = SlotMachine(self.facts, SlotPolicy(slots=slots, groups=groups, queue_limit=10_000))
        self.random = random.Random(1)
        self.windows: deque[Window] = deque()
        self.requests: list[Request] = []
        self.times: dict[str, list[float]] = {}
        self.running = 0
        self.now = 0.0
        self._last = 0

    def feed(self, kind: str, event: object) -> None:
        self.now += 0.001
        started = time.thread_time()
        commands = self.machine.receive(event, self.now)  # type: ignore[arg-type]
        self.times.setdefault(kind, []).append((time.thread_time() - started) * 1e6)
        for command in commands:
            if isinstance(command, Window):
                self.windows.append(command)
            elif isinstance(command, Finished):
                self.running -= 1

    def ask(self, prompt: list[int], max_tokens: int, prepacked: bool) -> str:
        self._last += 1
        name = str(self._last)
        request = Request(name, tuple(prompt), max_tokens, Sampling())
        event = Arrive(request, pack(prompt) if prepacked else b"")
        self.running += 1
        # A fresh prompt's walk by the collector, and its release, belong to whoever made it.
        gc.collect(0)
        self.requests.append(request)
        self.feed("arrive", event)
        return name

    def land(self) -> None:
        window = self.windows.popleft()
        rows = sum(len(segment.tokens) for segment in window.segments)
        seconds = 0.01 * (1 + 0.05 * rows)
        results = tuple(self._result(segment) for segment in window.segments)
        drafting = 0.0005 * max(len(result.drafts) for result in results)
        self.feed(window.kind, WindowDone(window.id, results, seconds + drafting, (seconds + drafting,), drafting))

    def _result(self, segment: Segment) -> SegmentResult:
        if segment.sampling is None:
            return SegmentResult()
        accepted = 0
        while accepted < segment.num_drafts and self.random.random() < 0.5:
            accepted += 1
        first = len(segment.tokens) - segment.num_drafts
        picks = (*segment.tokens[first:first + accepted], self.random.randrange(100_000))
        drafts = tuple(self.random.randrange(100_000) for _ in range(segment.draft_limits.mtp))
        return SegmentResult(picks, accepted, drafts=drafts, draft_source="mtp" if drafts else "")


def measure(slots: int, tokens: int, groups: int, active: int, turns: int, prepacked: bool, drafts: int) -> dict[str, list[float]]:
    """Fill every slot, then run ``turns`` requests: next turns of what is held, and one stranger in eight."""
    bench = Bench(slots, tokens, groups, drafts)
    system = [bench.random.randrange(100_000) for _ in range(tokens // 5)]
    histories: list[tuple[int, ...]] = []
    for _ in range(slots):
        text = system + [bench.random.randrange(100_000) for _ in range(tokens - len(system))]
        bench.ask(text, 1, True)
        histories.append(tuple(text))
    while bench.windows:
        bench.land()
    bench.times.clear()
    gc.collect()
    gc.freeze()  # as the server does when it is ready: what was built so far is not walked again
    for turn in range(turns):
        while bench.running >= active:
            bench.land()
        text = bench.random.choice(histories) if turn % 8 else tuple(system)
        bench.ask([*text, *(bench.random.randrange(100_000) for _ in range(200))], 300, prepacked)
    while bench.windows:
        bench.land()
    bench.machine.check_integrity()
    return bench.times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--active", type=int, default=8, help="answers running at a time")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--drafts", type=int, default=0, help="drafts that a window may check for each slot (--spec less one)")
    parser.add_argument("--cold", action="store_true", help="prompts arrive unpacked (packing costs 15 ns a token)")
    options = parser.parse_args()
    times = measure(options.slots, options.tokens, options.groups, options.active, options.turns, not options.cold, options.drafts)
    print(f"{'event':10} {'count':>7} {'median us':>10} {'p99 us':>8} {'max us':>8}")
    times["all"] = [value for values in times.values() for value in values]
    summary = {}
    for kind, values in times.items():
        values.sort()
        p99 = values[int(len(values) * 0.99)]
        print(f"{kind:10} {len(values):7} {statistics.median(values):10.1f} {p99:8.1f} {values[-1]:8.1f}")
        summary[kind] = {"median_us": round(statistics.median(values), 1), "p99_us": round(p99, 1), "count": len(values)}
    setup = {"slots": options.slots, "tokens": options.tokens, "active": options.active, "drafts": options.drafts}
    print(json.dumps({"bench": "slot machine", **setup, **summary}))


if __name__ == "__main__":
    main()
