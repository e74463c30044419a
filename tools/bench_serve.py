"""Measure a server as its clients see it: decode, prompts, several clients at once; and the same of any peer in the same run.

    python tools/bench_serve.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf
    python tools/bench_serve.py --url strata=http://127.0.0.1:8080 --url peer=http://127.0.0.1:8081

With ``--model`` a server of this checkout is started and stopped, and the time NumPy needs for the bare matrix products of the
same model is measured between the rounds. Targets take turns, so that a machine that changes its speed changes it for
all; medians are printed. Greedy, ``ignore_eos``, prompts as token ids, no prompt twice. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from socket import socket
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.httpclient import Answer, Client  # noqa: E402

Row = dict[str, float]


def fresh_ids(rng: random.Random, count: int) -> list[int]:
    """Token ids that no cache has seen: beyond the special ones, inside any usual vocabulary."""
    return [rng.randrange(1000, 30000) for _ in range(count)]


def completion(ids: list[int], tokens: int) -> dict[str, Any]:
    return {"model": "bench", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def one_round(client: Client, rng: random.Random, args: argparse.Namespace) -> Row:
    """One pass over the measures for one target."""
    row: Row = {}
    reading = await checked(client, completion(fresh_ids(rng, args.prompt), 1))
    row["prompt tok/s"] = args.prompt / (reading.done - reading.sent)
    for count in args.clients:
        bodies = [completion(fresh_ids(rng, args.short), args.tokens) for _ in range(count)]
        begin = time.monotonic()
        answers = await asyncio.gather(*(checked(client, body) for body in bodies))
        row[f"{count} clients tok/s"] = sum(a.generated for a in answers) / (time.monotonic() - begin)
        row[f"{count} clients ms/token"] = statistics.median(a.decode_ms for a in answers)
    return row


async def checked(client: Client, body: dict[str, Any]) -> Answer:
    try:
        answer = await client.stream("/v1/completions", body)
    except OSError as error:
        raise SystemExit(f"no server at {client.host}:{client.port}: {error}") from None
    if answer.status != 200 or answer.error:
        raise SystemExit(f"{client.host}:{client.port} answered {answer.status}: {answer.error[:300]}")
    return answer


@contextmanager
def own_server(model: str, extra: list[str]) -> Iterator[tuple[str, float]]:
    """A server of this checkout on a free port; yields its URL and the seconds from start to ready."""
    with closing(socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "strata.server", "--model", model, "--port", str(port), *extra]
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what ends this ends the server too
    process = subprocess.Popen(command, cwd=Path(__file__).resolve().parent.parent)
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(until_ready(Client(url), process))
        yield url, time.monotonic() - begin
    finally:
        process.terminate()
        process.wait(30)


async def until_ready(client: Client, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            if (await client.get("/ready"))[0] == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.05)
    raise SystemExit("the server did not start; its message is above")


def measure(targets: dict[str, str], args: argparse.Namespace) -> dict[str, list[Row]]:
    """Rounds of every target in turn; the first round warms up and is dropped. With a model, the bare products as a target of its own."""
    rows: dict[str, list[Row]] = {name: [] for name in targets}
    rng = random.Random(args.seed)
    bare = bare_products(args.model) if args.model else None
    for number in range(args.rounds + 1):
        for name, url in targets.items():
            row = asyncio.run(one_round(Client(url), rng, args))
            if number:
                rows[name].append(row)
        if bare and number:
            rows.setdefault("bare", []).append(bare())
    return rows


def bare_products(path: str) -> Callable[[], Row]:
    """One pass of the model's matrix products and nothing else, in this process: for 1 row, for 8 rows, and as GEMM of a prompt."""
    from tools import bench_ops

    model = bench_ops.load(Path(path), None)
    threads = model.ops.threads
    needed = {count: bench_ops.products(model, bench_ops.decode_window(count)) for count in (1, bench_ops.SLOTS)}
    gemm = bench_ops.bare_gemm(threads, bench_ops.products(model, bench_ops.prompt_window(bench_ops.PROMPT)))
    rows = {1: bench_ops.bare_row(threads, needed[1]), bench_ops.SLOTS: bench_ops.bare_rows(threads, needed[bench_ops.SLOTS])}

    def row() -> Row:
        found = {f"{count} clients ms/token": 1e3 * min(bench_ops.timed(work) for _ in range(5)) for count, work in rows.items()}
        return {"prompt tok/s": bench_ops.PROMPT / min(bench_ops.timed(gemm) for _ in range(3)), **found}

    return row


def report(rows: dict[str, list[Row]], extra: Row) -> None:
    medians = {name: {key: statistics.median(r[key] for r in of) for key in of[0]} for name, of in rows.items()}
    keys = list(dict.fromkeys(key for row in medians.values() for key in row))
    print(f"\n{'':24}" + "".join(f"{name:>14}" for name in medians))
    for key in keys:
        print(f"{key:24}" + "".join(f"{row[key]:14.2f}" if key in row else f"{'-':>14}" for row in medians.values()))
    for key, value in extra.items():
        print(f"{key:24}{value:14.2f}")
    print(json.dumps({**medians, "extra": extra}))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="start a server of this checkout with this GGUF file, and measure its bare products beside it")
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="a server that is already running (repeatable)")
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8], metavar="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate per request (96)")
    parser.add_argument("--short", type=int, default=16, help="prompt tokens of the decoding clients (16)")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens of the reading measure (512)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("server", nargs="*", help="after --: further arguments of the started server")
    args = parser.parse_args(argv)
    if not args.model and not args.url:
        parser.error("nothing to measure: give --model FILE or --url NAME=URL")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    targets = dict(item.split("=", 1) for item in args.url)
    if not args.model:
        report(measure(targets, args), {})
        return 0
    with own_server(args.model, args.server) as (url, load_s):
        report(measure({"strata": url, **targets}, args), {"load to ready s": load_s})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
