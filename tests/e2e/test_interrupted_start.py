"""Ctrl-C before there is a loop that could take it."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.process import launched

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


@pytest.mark.skipif(os.name == "nt", reason="Windows ends a process without a signal")
@pytest.mark.parametrize("name", ["strata.config", "strata.app", "strata.slots"])
async def test_ctrl_c_among_the_imports_ends_it_without_a_word(name: str) -> None:
    async with launched(before=AT_IMPORT.format(name=name)) as process:
        assert await process.ended() == -signal.SIGINT
    assert process.log == []
