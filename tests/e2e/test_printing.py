"""What the process prints: to a reader that leaves, and as a log of JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.e2e.process import ROOT, launched
from tests.e2e.serving import COMPLETIONS, completion, some_tokens


@pytest.mark.parametrize("mode", ["--help", "--version", "--print-config"])
def test_what_is_printed_ends_its_last_line(mode: str) -> None:
    """Or the shell's prompt, or the next file of a ``cat``, stands behind it."""
    done = subprocess.run([sys.executable, "-m", "strata.server", mode], cwd=ROOT, capture_output=True, timeout=120, check=True)
    assert done.stdout.endswith(os.linesep.encode()) and not done.stdout.endswith(2 * os.linesep.encode())


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE")
@pytest.mark.parametrize("mode", ["--help", "--version", "--print-config"])
def test_a_reader_that_leaves_is_no_error(mode: str) -> None:
    """``--help | head`` with a reader that has left before the first byte."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "strata.server", mode], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, timeout=120
        )
    finally:
        os.close(writing)
    assert done.stderr == b"" and done.returncode == -signal.SIGPIPE


async def test_a_log_of_json_is_json_line_by_line() -> None:
    async with launched("--log-format", "json") as process:
        ready = json.loads(await process.until_line("ready in"))
        process.url = ready["message"].rpartition(" on ")[2]
        answer = await process.call("POST", COMPLETIONS, completion(some_tokens(5), 3))
        assert answer.status == 200 and await answer.json()
        line = json.loads(await process.until_line('"request"'))
        await process.call("GET", "/nosuch")
        refused = json.loads(await process.until_line("not_found"))
    assert all({"time", "level", "message"} <= json.loads(each).keys() for each in process.log)
    assert (line["message"], line["level"], line["route"], line["status"]) == ("request", "info", COMPLETIONS, 200)
    assert (line["end"], line["generated"], line["read"] + line["reused"]) == ("length", 3, 5)
    assert (refused["route"], refused["status"], refused["error"]) == ("other", 404, "not_found")
