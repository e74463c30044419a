"""Is a request's answer the same alone and in company? Every token of it, greedy and seeded, over HTTP.

    python tools/batch_test.py --url http://127.0.0.1:8080
    python tools/batch_test.py --model FILE --also "--layer-split 10,20" --also "--batch-groups 1 --rows prefix" [-- server arguments]
    python tools/batch_test.py --model FILE --also "--spec 4" --also "--spec 4 --layer-split 10,20"

First every request runs alone. Then all of them together: they come one after the other while those before are being answered, one has a
long prompt, one client leaves in the middle, and a conversation's next turn arrives while the others run. ``--also`` starts further servers
of the same model with other arguments, whose answers must be those of the first. Of a server that drafts it is printed how many drafts were
right: where none were, equal answers say little.

Exit: 0 all tokens equal; 1 a difference (printed with its place); 2 there was nothing to compare: no server, an error, too short a context.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.bench_serve import own_server  # noqa: E402
from tools.httpclient import Answer, Client  # noqa: E402

EQUAL, DIFFERENT, UNTESTED = 0, 1, 2
STAGGER = 2  # tokens of the request before, when the next one comes
WORDS = (
    "river stone lantern winter engine paper garden signal copper window marble harbour violin thunder pocket meadow "
    "ladder orange silver candle forest bridge planet mirror basket feather island kettle anchor pepper"
).split()

Answers = dict[str, list[int]]


class CannotTest(Exception):
    """The server did not answer as a test needs it."""


@dataclass(frozen=True)
class Ask:
    """One request: a prompt as token ids, how many tokens to generate, and how to sample them."""

    name: str
    prompt: tuple[int, ...]
    tokens: int
    sampling: dict[str, Any]

    def body(self, reuse: bool) -> dict[str, Any]:
        """``reuse``: may go on from what is held; else the prompt is read from its start."""
        return {
            "prompt": list(self.prompt), "max_tokens": self.tokens, "ignore_eos": True, "return_token_ids": True, "cache_prompt": reuse,
            **self.sampling,
        }

    def next_turn(self, answer: list[int], more: Iterable[int]) -> Ask:
        return Ask(f"{self.name}, next turn", (*self.prompt, *answer, *more), self.tokens, self.sampling)


@dataclass(frozen=True)
class Scenario:
    """Requests in the order in which they come; the first one has a next turn that goes on with ``more``."""

    asks: tuple[Ask, ...]
    more: tuple[int, ...]
    leaver: Ask


async def make_scenario(client: Client, count: int, tokens: int, long: int, seed: int) -> Scenario:
    """Prompts of random words: short ones, and one of about ``long`` tokens in the middle. Every second one is seeded, not greedy."""
    rng = random.Random(seed)

    async def prompt(words: int) -> tuple[int, ...]:
        text = " ".join(rng.choice(WORDS) for _ in range(words))
        return tuple((await asked(client.post("/tokenize", {"content": text, "add_special": True})))["tokens"])

    asks = []
    for number in range(count):
        is_long = number == count // 2
        ids = (await prompt(long))[:long] if is_long else await prompt(rng.randrange(3, 40))
        sampling = {"temperature": 1.0, "seed": 100 + number} if number % 2 else {"temperature": 0}
        # The first one ends early, so that its next turn comes while the others run.
        asks.append(Ask(f"{'long' if is_long else 'short'} {number}", ids, tokens if number else tokens // 3, sampling))
    return Scenario(tuple(asks), await prompt(10), Ask("leaves", await prompt(12), tokens, {"temperature": 0}))


async def asked(call: Any) -> Any:
    try:
        status, answer = await call
    except (OSError, EOFError) as error:
        raise CannotTest(f"no server: {error}") from error
    if status != 200:
        raise CannotTest(f"status {status}: {str(answer)[:300]}")
    return answer


async def complete(client: Client, ask: Ask, reuse: bool = False, started: asyncio.Event | None = None) -> Answer:
    """A streamed completion; ``started`` is set when it has STAGGER tokens."""

    def watch(answer: Answer) -> None:
        if started is not None and len(answer.tokens) >= STAGGER:
            started.set()

    try:
        answer = await client.stream("/v1/completions", ask.body(reuse), watch)
    except (OSError, EOFError) as error:
        raise CannotTest(f"{ask.name}: {error}") from error
    finally:
        if started is not None:
            started.set()
    if answer.status != 200 or answer.error or len(answer.tokens) != ask.tokens:
        raise CannotTest(f"{ask.name}: status {answer.status}, {len(answer.tokens)} of {ask.tokens} tokens: {answer.error[:300]}")
    return answer


async def alone(client: Client, scenario: Scenario) -> Answers:
    """One request after the other."""
    found: Answers = {}
    for ask in scenario.asks:
        found[ask.name] = (await complete(client, ask)).tokens
        if ask is scenario.asks[0]:
            turn = ask.next_turn(found[ask.name], scenario.more)
            found[turn.name] = (await complete(client, turn, reuse=True)).tokens
    return found


async def together(client: Client, scenario: Scenario) -> Answers:
    """All at once, each coming when the one before it is being answered."""
    found: Answers = {}

    async def run(ask: Ask, started: asyncio.Event) -> None:
        found[ask.name] = (await complete(client, ask, started=started)).tokens
        if ask is scenario.asks[0]:
            turn = ask.next_turn(found[ask.name], scenario.more)
            found[turn.name] = (await complete(client, turn, reuse=True)).tokens

    tasks: list[asyncio.Task[None]] = []
    try:
        for number, ask in enumerate(scenario.asks):
            started = asyncio.Event()
            tasks.append(asyncio.create_task(run(ask, started)))
            await started.wait()
            if number == 1:
                tasks.append(asyncio.create_task(leave(client, scenario.leaver)))
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return found


class _Gone(Exception):
    """Raised by a client that leaves."""


async def leave(client: Client, ask: Ask) -> None:
    """Ask, and hang up after a few tokens."""

    def watch(answer: Answer) -> None:
        if len(answer.tokens) >= 2 * STAGGER:
            raise _Gone

    try:
        await client.stream("/v1/completions", ask.body(False), watch)
    except _Gone:
        pass


def differences(wanted: Answers, got: Answers, where: str) -> list[str]:
    """One line for each answer that is not the wanted one."""
    lines = []
    for name, tokens in wanted.items():
        other = got[name]
        if other != tokens:
            place = next((index for index, pair in enumerate(zip(tokens, other)) if pair[0] != pair[1]), min(len(tokens), len(other)))
            lines.append(f"{where}: {name}: token {place} is {other[place:place + 1]} instead of {tokens[place:place + 1]}")
    return lines


async def drafts(client: Client) -> str:
    """How many drafts the server has checked and accepted since its start; "" where there were none, or it does not say."""
    _, text = await client.get("/metrics")
    counts = [re.search(rb"vllm:spec_decode_num_%s_tokens_total\{[^}]*\} (\S+)" % kind, text) for kind in (b"accepted", b"draft")]
    accepted, drafted = (float(count[1]) if count else 0.0 for count in counts)
    return f"; {accepted:.0f} of {drafted:.0f} drafts accepted" if drafted else ""


async def check_server(url: str, options: argparse.Namespace, label: str, wanted: Answers | None) -> tuple[Answers, list[str]]:
    """The answers of this server alone, and how they and those in company differ from ``wanted`` (default: its own alone)."""
    client = Client(url)
    scenario = await make_scenario(client, options.requests, options.tokens, options.long, options.seed)
    first = await alone(client, scenario)
    found = [] if wanted is None else differences(wanted, first, f"{label}, alone")
    for number in range(options.rounds):
        in_company = await together(client, scenario)
        found += differences(wanted or first, in_company, f"{label}, together{f' ({number + 1})' if options.rounds > 1 else ''}")
    verdict = f"{len(found)} differ" if found else "equal"
    print(f"{label}: {len(first)} answers of {sum(map(len, first.values()))} tokens, {verdict}{await drafts(client)}", flush=True)
    return first, found


def run(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Labels of the servers tested, and every difference."""
    if options.url:
        return [options.url], asyncio.run(check_server(options.url, options, options.url, None))[1]
    wanted: Answers | None = None
    found: list[str] = []
    labels = []
    for extra in ["", *options.also]:
        labels.append(extra or "as given")
        try:
            with own_server(options.model, [*options.server, *shlex.split(extra)]) as (url, _):
                answers, lines = asyncio.run(check_server(url, options, labels[-1], wanted))
        except SystemExit as error:
            raise CannotTest(str(error)) from error
        wanted = wanted or answers
        found += lines
    return labels, found


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that is already running")
    parser.add_argument("--model", help="start a server of this checkout with this GGUF file")
    parser.add_argument("--also", action="append", default=[], metavar="ARGS", help="a further server's arguments (repeatable)")
    parser.add_argument("--requests", type=int, default=8, help="requests at once (8)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer (48)")
    parser.add_argument("--long", type=int, default=600, help="tokens of the long prompt (600)")
    parser.add_argument("--rounds", type=int, default=1, help="how often all run together (1)")
    parser.add_argument("--seed", type=int, default=1, help="other prompts")
    parser.add_argument("server", nargs="*", help="after --: arguments of every started server")
    options = parser.parse_args(argv)
    if bool(options.url) == bool(options.model) or options.requests < 2:
        parser.error("give --model FILE or --url URL, and at least two requests")
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    try:
        labels, found = run(options)
    except CannotTest as error:
        print(f"not tested: {error}", file=sys.stderr)
        return UNTESTED
    print("\n".join(found[:50]))
    print(json.dumps({"batch_test": labels, "requests": options.requests, "tokens": options.tokens, "differences": len(found)}))
    return DIFFERENT if found else EQUAL


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
