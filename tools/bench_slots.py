"""The two slot experiments on the real server over HTTP: lowest free slot first, and who a side request displaces.

    python tools/bench_slots.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf            both, and their tables
    python tools/bench_slots.py --model FILE --only side --long 6000

(a) 1, 2, 3, 4, 8 clients, three requests of 300 tokens each at temperature 0.7, on 8 slots in 4 groups with ``rows=prefix``, with
``STRATA_SLOT_LOW_FIRST`` 0 and 1. (b) On 3 slots in one group, while a third stream decodes: conversations A (long) and B (short)
end, a side request of one line comes, then A and B send their next turns; with ``STRATA_SLOT_EXPIRE_S`` 600, 0 and unset, with and
without shelf and parking. Every arm has a server of its own. Prints Markdown tables, row by row, and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.bench_serve import checked, own_server  # noqa: E402
from tools.httpclient import Answer, Client  # noqa: E402


def body(ids: list[int], tokens: int, temperature: float = 0.7) -> dict[str, Any]:
    return {"model": "bench", "prompt": ids, "max_tokens": tokens, "temperature": temperature, "ignore_eos": True}


# ---------------------------------------------------------------- (a) lowest free slot first


async def crowd(client: Client, rng: random.Random, clients: int, requests: int, tokens: int) -> float:
    """Total tokens/s of ``clients`` that send their requests one after the other."""
    async def one() -> int:
        count = 0
        for _ in range(requests):
            # One-shot: the pipelined slots of the original kept no conversation, so that held histories never decided.
            payload = {**body([rng.randrange(1000, 30000) for _ in range(16)], tokens), "cache_prompt": False}
            count += (await checked(client, payload)).generated
        return count

    begin = time.monotonic()
    total = sum(await asyncio.gather(*(one() for _ in range(clients))))
    return total / (time.monotonic() - begin)


def low_first(options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Both arms' total tokens/s. Both servers run all the time and take turns, so that a machine that drifts is the same for both."""
    flags = ["--batch", "8", "--batch-groups", "4", "--rows", options.rows, *options.server]
    print(f"\n8 slots, 4 groups, rows={options.rows}, {options.requests} requests of {options.tokens} tokens each, total tokens/s\n")
    print("| clients | `STRATA_SLOT_LOW_FIRST=0` | lowest free slot first | gain |")
    print("| ---: | ---: | ---: | ---: |", flush=True)
    means: dict[str, dict[int, float]] = {"off": {}, "on": {}}
    with own_server(options.model, [*flags, "--slot-low-first", "off"]) as (old, _), own_server(
        options.model, [*flags, "--slot-low-first", "on"]
    ) as (new, _):
        urls = {"off": old, "on": new}
        rngs = {arm: random.Random(options.seed) for arm in urls}
        for arm, url in urls.items():
            asyncio.run(crowd(Client(url), rngs[arm], 2, 1, 16))
        for clients in options.clients:
            runs: dict[str, list[float]] = {"off": [], "on": []}
            for number in range(options.rounds):
                for arm in ("off", "on") if number % 2 == 0 else ("on", "off"):
                    runs[arm].append(asyncio.run(crowd(Client(urls[arm]), rngs[arm], clients, options.requests, options.tokens)))
            for arm in runs:
                means[arm][clients] = sum(runs[arm]) / len(runs[arm])
            before, after = means["off"][clients], means["on"][clients]
            print(f"| {clients} | {before:.1f} | {after:.1f} | {(after / before - 1) * 100:+.1f} % |", flush=True)
    return means


# ---------------------------------------------------------------- (b) the side request


async def slot_with(client: Client, tokens: int) -> int:
    """The id of the idle slot that holds ``tokens`` tokens; -1 for none."""
    slots = json.loads((await client.get("/slots"))[1])
    found = [slot for slot in slots if not slot["is_processing"] and slot["n_tokens"] == tokens]
    return int(found[0]["id"]) if found else -1


async def side_request(url: str, long: int, seed: int) -> dict[str, Any]:
    client, rng = Client(url), random.Random(seed)
    fresh = lambda count: [rng.randrange(1000, 30000) for _ in range(count)]  # noqa: E731
    texts = {"A": fresh(long), "B": fresh(long // 23)}
    stream = asyncio.create_task(client.stream("/v1/completions", body(fresh(8), 1 << 12)))
    for name, text in texts.items():
        await checked(client, body(text, 8, 0.0))
    # Of an answer of 8 tokens the last was picked and never read.
    where = {name: await slot_with(client, len(text) + 7) for name, text in texts.items()}
    side: Answer = await checked(client, body(fresh(20), 8, 0.0))
    lost = [name for name, text in texts.items() if await slot_with(client, len(text) + 7) < 0]
    row: dict[str, Any] = {"slots": where, "side takes": "".join(lost) or "none", "side s": round(side.ttft, 2)}
    for name, text in texts.items():
        answer = await checked(client, body(text + fresh(20), 8, 0.0))
        cached = answer.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        row[name] = {"read": len(text) + 20 - cached, "s": round(answer.ttft, 2)}
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    return row


def side(options: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"\n3 slots, one group, a third stream decodes; A has {options.long} tokens, B {options.long // 23}\n")
    print("| shelf | parking | `STRATA_SLOT_EXPIRE_S` | side request takes | A's next turn reads | after | B's next turn reads | after |")
    print("| --- | --- | --- | --- | ---: | ---: | ---: | ---: |")
    rows = []
    for shelf, cache in (("off", "0"), ("off", "2048"), ("on", "0")):
        for expire in ("600", "0", None):
            flags = ["--batch", "3", "--batch-groups", "1", "--shelf", shelf, "--conversation-cache-mib", cache]
            flags += ["--drain-timeout-s", "1", *(["--slot-expire-s", expire] if expire else []), *options.server]
            with own_server(options.model, flags) as (url, _load):
                row = asyncio.run(side_request(url, options.long, options.seed))
            a, b = row["A"], row["B"]
            parking = "on" if cache != "0" else "off"
            takes = f"{row['side takes']}'s slot" if row["side takes"] != "none" else "nobody's"
            print(
                f"| {shelf} | {parking} | {expire or 'unset'} | {takes} | "
                f"{a['read']:,} | {a['s']:.2f} s | {b['read']:,} | {b['s']:.2f} s |",
                flush=True,
            )
            rows.append({"shelf": shelf, "parking": parking, "expire": expire or "unset", **row})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--only", choices=("low-first", "side"))
    parser.add_argument("--clients", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3, 4, 8])
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2, help="of the crowds of (a), whose mean is taken")
    parser.add_argument("--rows", choices=("prefix", "compact"), default="prefix")
    parser.add_argument("--long", type=int, default=6000, help="tokens of conversation A")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("server", nargs="*", help="after --: further arguments of the started servers")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.only != "side":
        found["low_first"] = low_first(options)
    if options.only != "low-first":
        found["side"] = side(options)
    print(json.dumps({"bench": "slots", **found}))


if __name__ == "__main__":
    main()
