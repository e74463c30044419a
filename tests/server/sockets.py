"""A world behind a real port."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from strata.server.listener import Listener
from tests.server.harness import World

HOST = "127.0.0.1"


@contextlib.asynccontextmanager
async def serving(world: World) -> AsyncIterator[Listener]:
    """The world behind a real port, with worker threads as in production."""
    listener = Listener(world.routes, world.limits)
    with ThreadPoolExecutor(2) as executor:
        world.site.executor = executor
        await listener.start(HOST, 0)
        try:
            yield listener
        finally:
            await listener.close()
            world.manager.close()
