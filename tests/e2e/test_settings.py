"""Every setting is read by a server that starts and answers: by code that runs, not only by code that is there.

Which origin a value comes from is for tests/config; here is whether anybody then asks for it. The settings' own package and
what only shows values (strata_config_info of /metrics) do not count.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from strata.app import Server
from strata.config import TABLE, Settings
from strata.devices.host_compiler import find_compiler
from tests.e2e.serving import CHAT, COMPLETIONS, TINY, Served, completion, some_tokens

NAMES = {row.name for row in TABLE}
SHOW_ONLY = ("strata/config/", "strata/server/service.py", "/dataclasses.py")
# Read before there is a server: by load(), and by run(), which sets up the log.
BEFORE = {"config", "log_level", "log_format"}
# The processors have no use for these.
ON_DEVICES = {"kernel_cache", "compiler"}
# Only with a GPU, several devices, a head, a model of experts, an address beyond this machine.
ELSEWHERE = {"cuda_toolkit", "peer_copy", "draft_vocab", "expert_cache_mib", "allow_remote_without_key"}


class Watched(Settings):
    """Settings that note in ``seen`` who has read what of them."""

    seen: set[str]

    def __getattribute__(self, name: str) -> Any:
        reader = Path(sys._getframe(1).f_code.co_filename).as_posix()
        if name in NAMES and not any(part in reader for part in SHOW_ONLY):
            object.__getattribute__(self, "seen").add(name)
        return object.__getattribute__(self, name)


async def read_by_a_server(model: Path, **values: Any) -> set[str]:
    """Names of the settings that a server with these has read when it has answered once in every way."""
    settings = Watched(model=model, port=0, context=1024, drain_timeout_s=0.0, **values)
    object.__setattr__(settings, "seen", set())
    async with Server(settings) as server:
        with Served(server) as served:
            await served.post(COMPLETIONS, completion(some_tokens(5), 2, model="tiny"))
            call = await served.call("POST", COMPLETIONS, completion(some_tokens(5), 2, stream=True))
            while await call.event() is not None:
                pass
            await served.post(CHAT, completion([{"role": "user", "content": "x"}], 2))
            await served.get("/props")
    return settings.seen


async def test_every_setting_is_read_on_the_processors(tiny_chat: Path) -> None:
    assert NAMES - await read_by_a_server(tiny_chat, spec=2) == BEFORE | ON_DEVICES | ELSEWHERE & NAMES


@pytest.mark.cxx
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (g++ or clang++) found")
async def test_every_setting_is_read_on_a_device(tiny_chat: Path) -> None:
    seen = await read_by_a_server(tiny_chat, device="emulated", threads=1, batch=2)
    assert ON_DEVICES <= seen


async def test_what_nobody_reads_would_be_found() -> None:
    settings = Watched(model=TINY)
    object.__setattr__(settings, "seen", set())
    assert (settings.batch, settings.top_k) == (8, 0) and settings.seen == {"batch", "top_k"}
