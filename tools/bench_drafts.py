"""What drafts are worth on the real server over HTTP: decoding with ``--spec 1`` and with drafts, by turns, on prompts no head has seen.

    python tools/bench_drafts.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --mtp configs/heads/smollm2-135m-mtp.gguf

Forty prompts (20 chat, 20 plain text, topics held out from training; or, with ``--ask copy``, requests to repeat some lines of Python, as
an agent does that rewrites a file). Both servers run all the time and take turns, first the one, then the other first. One client asks a
fifth of the prompts in each of five turns; several clients share all forty in every turn, each taking the next prompt when it has its
answer. The figure is the median over the turns. Answers must be equal to the letter: exit 1 if one is not. Prints a table and one JSON
line.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.bench_serve import own_server  # noqa: E402
from tools.httpclient import Answer, Client  # noqa: E402
from tools.train_mtp.topics import HELD_OUT_CHAT, HELD_OUT_PLAIN  # noqa: E402

TURNS = 5
COPIED_LINES = 16


@dataclass(frozen=True)
class Ask:
    """One prompt; ``chat``: a question, else a beginning."""

    text: str
    chat: bool

    def request(self, tokens: int, temperature: float) -> tuple[str, dict[str, Any]]:
        more = {"model": "bench", "max_tokens": tokens, "temperature": temperature, "seed": 1, "cache_prompt": False}
        if self.chat:
            return "/v1/chat/completions", {"messages": [{"role": "user", "content": self.text}], **more}
        return "/v1/completions", {"prompt": self.text, **more}


@dataclass(frozen=True)
class Turn:
    """What one server did in one turn."""

    tokens: int
    seconds: float
    drafted: int
    accepted: int
    windows: int
    texts: tuple[str, ...]

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def held_out() -> list[Ask]:
    return [Ask(text, True) for text in HELD_OUT_CHAT] + [Ask(text, False) for text in HELD_OUT_PLAIN]


def copied() -> list[Ask]:
    """Forty pieces of a file that every Python has."""
    lines = inspect.getsource(argparse).splitlines()[200:]
    pieces = ["\n".join(lines[start : start + COPIED_LINES]) for start in range(0, 40 * COPIED_LINES, COPIED_LINES)]
    return [Ask(f"Repeat this Python code exactly as it is:\n\n```python\n{piece}\n```", True) for piece in pieces]


ASKS = {"held-out": held_out, "copy": copied}


def turns(asks: list[Ask], clients: int) -> list[list[Ask]]:
    """What is asked in each turn."""
    return [asks[number::TURNS] if clients == 1 else asks for number in range(TURNS)]


async def run_turn(url: str, asks: list[Ask], clients: int, tokens: int, temperature: float) -> Turn:
    """One client: seconds between the first and the last token of each answer, summed. Several: seconds from start to end."""
    begin, waiting = time.monotonic(), iter(asks)

    async def work() -> list[tuple[Ask, Answer]]:
        client = Client(url)
        return [(ask, await client.stream(*ask.request(tokens, temperature))) for ask in waiting]

    answered = [pair for pairs in await asyncio.gather(*(work() for _ in range(clients))) for pair in pairs]
    total, answers = time.monotonic() - begin, [answer for _, answer in sorted(answered, key=lambda pair: pair[0].text)]
    for answer in answers:
        if answer.status != 200 or answer.error:
            raise SystemExit(f"{url} answered {answer.status}: {answer.error[:300]}")
    return counted(answers, sum(answer.timings["predicted_ms"] for answer in answers) / 1e3 if clients == 1 else total)


def counted(answers: list[Answer], seconds: float) -> Turn:
    accepted = sum(answer.timings["draft_n_accepted"] for answer in answers)
    tokens = sum(answer.generated for answer in answers)
    return Turn(
        tokens, seconds, sum(answer.timings["draft_n"] for answer in answers), accepted,
        tokens - len(answers) - accepted,  # the prompt's window picks the first token, every other window one and what it accepts
        tuple(answer.text for answer in answers),
    )


def compare(urls: dict[str, str], clients: int, options: argparse.Namespace, temperature: float) -> dict[str, Any]:
    """Both servers, by turns."""
    runs: dict[str, list[Turn]] = {name: [] for name in urls}
    for number, asks in enumerate(turns(ASKS[options.ask](), clients)):
        for name in list(urls)[:: -1 if number % 2 else 1]:
            runs[name].append(asyncio.run(run_turn(urls[name], asks, clients, options.tokens, temperature)))
        speeds = ", ".join(f"{name} {done[-1].speed:.1f} tok/s" for name, done in runs.items())
        print(f"T={temperature:g}, {clients} at once, turn {number + 1} of {TURNS}: {speeds}", file=sys.stderr, flush=True)
    plain, drafted = runs["plain"], runs["drafts"]
    accepted, windows = sum(turn.accepted for turn in drafted), sum(turn.windows for turn in drafted)
    return {
        "plain tok/s": statistics.median(turn.speed for turn in plain),
        "drafts tok/s": statistics.median(turn.speed for turn in drafted),
        "ratio": statistics.median(after.speed / before.speed for before, after in zip(plain, drafted)),
        "accepted per window": accepted / max(1, windows),
        "acceptance": accepted / max(1, sum(turn.drafted for turn in drafted)),
        "different texts": sum(a != b for before, after in zip(plain, drafted) for a, b in zip(before.texts, after.texts)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--mtp", help="a head; without it drafts come from lookup, or from a head within the model's file")
    parser.add_argument("--spec", default="0", help="of the server with drafts (default: as many as its own default)")
    parser.add_argument("--ask", choices=tuple(ASKS), default="held-out", help="what is asked for (%(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="per answer (%(default)s)")
    parser.add_argument("--temperatures", type=lambda text: [float(part) for part in text.split(",")], default="0,0.7", metavar="0,0.7",
                        help="(%(default)s)")
    parser.add_argument("--clients", type=lambda text: [int(part) for part in text.split(",")], default="1,8", metavar="1,8",
                        help="at once (%(default)s)")
    parser.add_argument("server", nargs="*", help="after --: further arguments of both servers")
    options = parser.parse_args()
    head = ["--mtp", options.mtp] if options.mtp else []
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        urls = {
            "plain": stack.enter_context(own_server(options.model, ["--spec", "1", *options.server]))[0],
            "drafts": stack.enter_context(own_server(options.model, ["--spec", options.spec, *head, *options.server]))[0],
        }
        for temperature in options.temperatures:
            for clients in options.clients:
                row = compare(urls, clients, options, temperature)
                found[f"T={temperature:g}, {clients} at once"] = row
    print(f"\n40 prompts, up to {options.tokens} tokens each, medians of {TURNS} turns\n")
    keys = list(next(iter(found.values())))
    print(f"| | {' | '.join(keys)} |\n| --- |{' ---: |' * len(keys)}")
    for name, row in found.items():
        print(f"| {name} | {' | '.join(f'{row[key]:.2f}' if isinstance(row[key], float) else str(row[key]) for key in keys)} |")
    print(json.dumps({"bench": "drafts", **found}))
    return int(any(row["different texts"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
