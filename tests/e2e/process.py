"""The server as a process of its own, started as a user starts it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.e2e.serving import TINY, Address

ROOT = Path(__file__).parent.parent.parent
# Run a script before the server, in its process; the server's arguments follow.
AFTER = "import runpy, sys; sys.argv[0] = 'strata'; runpy.run_module('strata.server', run_name='__main__')"


class Process(Address):
    """A server process. ``url`` is where it listens, ``log`` the lines it has written so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__("")
        self._process = process
        self.log: list[str] = []

    async def until_line(self, text: str) -> str:
        """Read the log up to the first line that holds ``text``."""
        assert self._process.stderr is not None
        while line := (await self._process.stderr.readline()).decode():
            self.log.append(line.rstrip("\n"))
            if text in line:
                return self.log[-1]
        raise AssertionError(f"no line with {text!r} before the end: {self.log}")

    async def until_ready(self) -> Process:
        self.url = (await self.until_line("ready in")).rpartition(" on ")[2]
        return self

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the end; the exit status. The rest of the log is in ``log`` then."""
        out, err = await self._process.communicate()
        assert out == b""
        self.log += err.decode().splitlines()
        status = self._process.returncode
        assert status is not None
        return status

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()


@asynccontextmanager
async def launched(*arguments: str, before: str = "", model: Path | None = TINY, **environment: str) -> AsyncIterator[Process]:
    """``python -m strata.server`` on a free port with these arguments; ``before``: Python to run first in that process."""
    start = ["-c", f"{before}\n{AFTER}"] if before else ["-m", "strata.server"]
    chosen = ["--port", "0", "--context", "1024", *(["--model", str(model)] if model else []), *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
    process = Process(await asyncio.create_subprocess_exec(
        sys.executable, *start, *chosen, cwd=ROOT, env={**clean, **environment},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    ))
    try:
        with process:
            yield process
    finally:
        await process.kill()
