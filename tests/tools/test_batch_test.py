"""tools/batch_test.py on the tiny model: the same tokens for every split, number of groups and kind of rows; and that it can say no."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from contextlib import closing
from pathlib import Path
from socket import socket
from typing import Any

import pytest

from strata.devices.host_compiler import find_compiler
from strata.messages import DraftLimits
from strata.slots import speculation
from tests.e2e.serving import TINY, serving
from tests.engine.drafting import exact, rewritten
from tools import batch_test
from tools.batch_test import DIFFERENT, EQUAL, UNTESTED, Answers, check_server, differences, main

nightly = pytest.mark.skipif("STRATA_NIGHTLY" not in os.environ, reason="nightly: set STRATA_NIGHTLY=1")
SPLITS: dict[int, tuple[int, ...] | None] = {1: None, 2: (1,), 3: (1, 3), 4: (1, 2, 3)}
FEW = [(2, None, "compact"), (2, 1, "compact"), (3, 4, "prefix"), (4, None, "compact"), (4, 4, "compact"), (1, 2, "prefix")]
EVERY = [(stages, groups, rows) for stages in SPLITS for groups in (None, 1, 2, 4) for rows in ("compact", "prefix")]


@pytest.fixture(scope="module")
def drafting_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head of its own that is often right."""
    return rewritten("glm4moe-accept-some-iq3s", tmp_path_factory.mktemp("model") / "model.gguf", exact)


async def checked(
    wanted: Answers | None = None, tokens: int = 24, long: int = 300, requests: int = 5, rounds: int = 1, **settings: Any,
) -> Answers:  # fmt: skip
    """The answers of a server with these settings; they are the wanted ones, alone and together."""
    options = Namespace(requests=requests, tokens=tokens, long=long, seed=1, rounds=rounds)
    async with serving(**{"threads": 2, "chunk": 128, **settings}) as served:
        answers, found = await check_server(served.url, options, str(settings), wanted)
        served.manager.machine.check_integrity()
        counters = served.view().counters
    assert found == []
    assert "kv_memory_mib" not in settings or counters.parked, "memory was to be short"
    return answers


wanted_answers: Answers = {}
drafting_answers: Answers = {}


async def wanted() -> Answers:
    """Of one stage and one group; computed once."""
    if not wanted_answers:
        wanted_answers.update(await checked(batch_groups=1))
    return wanted_answers


def settings_of(stages: int, groups: int | None, rows: str) -> dict[str, Any]:
    return {"layer_split": SPLITS[stages], "batch_groups": groups, "rows": rows}


@pytest.mark.parametrize("stages, groups, rows", [pytest.param(*case, marks=[] if case in FEW else nightly) for case in EVERY])
async def test_no_split_and_no_groups_change_a_token_on_the_cpu(stages: int, groups: int | None, rows: str) -> None:
    await checked(await wanted(), **settings_of(stages, groups, rows))


async def test_a_balanced_split_with_prompts_read_by_rows() -> None:
    plain = await checked(deterministic=True, kv="int8", long=150)
    await checked(plain, deterministic=True, kv="int8", long=150, devices=("cpu", "cpu", "cpu"))


@pytest.mark.cxx
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (g++ or clang++) found")
async def test_no_split_and_no_groups_change_a_token_on_the_emulated_device() -> None:
    small: dict[str, Any] = {"tokens": 6, "long": 70, "requests": 3, "device": "emulated", "context": 256}
    one = await checked(**small, batch_groups=1)
    await checked(one, **small, layer_split=(1, 2, 3), devices=("1", "0", "1", "0"), batch_groups=4, rows="prefix")


SHORT: dict[str, Any] = {"kv_memory_mib": 4, "conversation_cache_mib": 64, "context": 400, "rounds": 2}
"""Memory for one conversation and a little: others are parked, and restored where they go on."""


@pytest.mark.parametrize("stages, groups, rows, more", [
    (1, None, "compact", {}), (2, 2, "prefix", {}), (4, None, "compact", {}), (2, 4, "compact", {**SHORT, "batch": 4}),
    pytest.param(4, 4, "prefix", {**SHORT, "chunk": 32}, marks=nightly), pytest.param(3, 1, "prefix", {**SHORT, "batch": 6}, marks=nightly),
])  # fmt: skip
async def test_drafts_change_no_token(
    stages: int, groups: int | None, rows: str, more: dict[str, Any], drafting_model: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As many drafts as can be, whatever they cost; from the model's head and from the slots' own text; also where histories move."""
    monkeypatch.setattr(speculation, "choose", lambda slots, *_: [DraftLimits(len(slot.mtp), len(slot.lookup)) for slot in slots])
    if not drafting_answers:
        drafting_answers.update(await checked(model=drafting_model, batch_groups=1))
    capsys.readouterr()
    await checked(drafting_answers, model=drafting_model, spec=4, **settings_of(stages, groups, rows), **more)
    found = re.search(r"equal; (\d+) of (\d+) drafts accepted", capsys.readouterr().out)
    assert found and 20 < int(found[1]) < int(found[2])


# ---------------------------------------------------------------- that it can say no


def test_a_difference_is_named_with_its_place() -> None:
    one: Answers = {"a": [1, 2, 3], "b": [4, 5]}
    assert differences(one, {"a": [1, 2, 3], "b": [4, 5]}, "x") == []
    assert differences(one, {"a": [1, 9, 3], "b": [4]}, "here") == [
        "here: a: token 1 is [9] instead of [2]", "here: b: token 1 is [] instead of [5]",
    ]


class OtherTokens(batch_test.Client):
    """A server whose answers depend on how many it is asked for at once."""

    running = 0

    async def stream(self, *arguments: Any) -> Any:
        OtherTokens.running += 1
        try:
            answer = await super().stream(*arguments)
        finally:
            OtherTokens.running -= 1
        if OtherTokens.running and answer.tokens:
            answer.tokens[-1] += 1
        return answer


async def test_answers_that_depend_on_company_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_test, "Client", OtherTokens)
    options = Namespace(requests=4, tokens=9, long=50, seed=1, rounds=1)
    async with serving() as served:
        _, found = await check_server(served.url, options, "server", None)
    assert found and all(line.startswith("server, together: ") for line in found)


def test_the_command_says_equal_different_and_not_tested(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--requests", "3", "--tokens", "9", "--long", "60", "--model", str(TINY)]
    server = ["--", "--context", "256", "--log-level", "error"]
    assert main([*small, "--also", "--layer-split 2", *server]) == EQUAL
    assert main([*small, "--also", "--kv int8", *server]) == DIFFERENT
    assert "--kv int8, alone: short" in capsys.readouterr().out
    assert main([*small, "--", "--context", "32"]) == UNTESTED
    assert main([*small, "--", "--layer-split", "9"]) == UNTESTED


def test_no_server_is_not_tested(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["--url", f"http://127.0.0.1:{port}"]) == UNTESTED
    assert "no server" in capsys.readouterr().err
