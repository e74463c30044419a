"""Signals before there is a loop that could take them, and after there was one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import h11
import pytest

from tests.e2e.process import launched
from tests.e2e.serving import COMPLETIONS, TINY, completion

posix = pytest.mark.skipif(os.name == "nt", reason="Windows ends a process without a signal")
# Interrupts its own process at the first import of a module.
AT_IMPORT = """
import os, signal, sys
class Interrupt:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt)
"""


@posix
@pytest.mark.parametrize("name", ["strata.config", "strata.app", "strata.slots"])
async def test_ctrl_c_among_the_imports_ends_it_without_a_word(name: str) -> None:
    async with launched(before=AT_IMPORT.format(name=name)) as process:
        assert await process.ended() == -signal.SIGINT
    assert process.log == []


# The server's last line comes before its process has ended. asyncio's own loop, because it leaves signals to the system then;
# uvloop does so a moment later, when no test can come in between.
AT_THE_END = """
import atexit, os, signal, sys
sys.modules["uvloop"] = None
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGTERM), os.kill(os.getpid(), signal.SIGINT)))
"""


@posix
async def test_one_signal_too_many_changes_nothing() -> None:
    async with launched(before=AT_THE_END) as process:
        await process.until_ready()
        process.signal(signal.SIGTERM)
        assert await process.ended() == 0
    assert process.log[-1].endswith("stopped")


@posix
async def test_a_model_file_that_is_cut_while_it_is_served_leaves_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(TINY.read_bytes())
    async with launched(model=path) as process:
        await process.until_ready()
        os.truncate(path, 1000)
        with pytest.raises((OSError, h11.RemoteProtocolError)):
            await (await process.call("POST", COMPLETIONS, completion("x", 2))).read()
        assert await process.ended() in (-signal.SIGBUS, -signal.SIGSEGV)
    assert any("Fatal Python error" in line for line in process.log)
