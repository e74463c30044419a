"""A real server in the test's loop, and a tap on the way to its engine.

``serving`` starts ``strata.app.Server`` on a free port with a committed model of random weights: a token takes some milliseconds.
The tap sees every window that the slot
machine sends, in order with the cancellations, and can hold windows back: so tests wait for events and never for time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from strata.app import Server
from strata.config import Settings
from strata.messages import EngineEvent, Window, WindowDone
from strata.slots import MachineView, SlotManager
from tests.e2e.client import Call, Result, Stream

DATA = Path(__file__).parent.parent / "data"
TINY = DATA / "tiny" / "llama-iq3s.gguf"
VOCABULARY = 512
CONTEXT = 1024
SMALLEST_GAP = 0.01  # nats between the two best tokens; below it another order of sums may choose the other one
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Prompt = Sequence[int] | str | Sequence[dict[str, Any]]
"""Token ids, a text, or the messages of a chat."""


@asynccontextmanager
async def serving(model: Path = TINY, **settings: Any) -> AsyncIterator[Served]:
    """A server on a free port of this machine, ready, and stopped at the end without waiting for anybody."""
    server = Server(Settings(**{"model": model, "port": 0, "context": CONTEXT, "drain_timeout_s": 0.0, **settings}))
    async with server:
        with Served(server) as served:
            yield served


def some_tokens(count: int, seed: int = 0) -> list[int]:
    """``count`` token ids between the control tokens and the end of the vocabulary; different seeds differ from the first one on."""
    return [3 + (7919 * (seed + 1) + 104729 * place * (seed + 1) + place * place) % (VOCABULARY - 3) for place in range(count)]


# ---------------------------------------------------------------- the tap


class Tap:
    """Between slot manager and engine. ``log``: ("window", Window) and ("cancel", request id), in the order in which they happened;
    ``seconds``: how long the engine was at work on each window that it has reported."""

    def __init__(self, manager: SlotManager) -> None:
        self.log: list[tuple[str, Any]] = []
        self.seconds: dict[int, float] = {}
        self._engine_submit, self._manager_cancel, self._report = manager.engine.submit, manager.cancel, manager._engine_reports
        self._held: list[Window] | None = None
        manager.engine.submit = self._submit  # type: ignore[method-assign]
        manager.cancel = self._cancel  # type: ignore[method-assign]
        manager._engine_reports = self._reported  # type: ignore[method-assign]

    @property
    def windows(self) -> list[Window]:
        return [what for kind, what in self.log if kind == "window"]

    def hold(self) -> None:
        """Keep windows back from now on; the one in flight runs to its end."""
        self._held = self._held or []

    @property
    def num_held(self) -> int:
        return len(self._held or ())

    def release(self) -> None:
        held, self._held = self._held or [], None
        for window in held:
            self._engine_submit(window)

    def after_cancel(self, request_id: str) -> list[Window]:
        """The windows with a row of the request that were sent after it had been cancelled."""
        later = self.log[self.log.index(("cancel", request_id)):]
        return [what for kind, what in later if kind == "window" and any(row.request_id == request_id for row in what.segments)]

    def _submit(self, window: Window) -> None:
        self.log.append(("window", window))
        if self._held is not None:
            self._held.append(window)
        else:
            self._engine_submit(window)

    def _reported(self, event: EngineEvent) -> None:
        if isinstance(event, WindowDone):
            self.seconds[event.window_id] = event.seconds
        self._report(event)

    def _cancel(self, request_id: str) -> None:
        self.log.append(("cancel", request_id))
        self._manager_cancel(request_id)


# ---------------------------------------------------------------- the server


class Address:
    """A server that is reached at ``url``, and what the tests ask of it. At the end of ``with`` every connection is closed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._calls: list[Call] = []

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        for call in self._calls:
            call.leave()

    async def open(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Call:
        """A request that is sent; its answer is not waited for."""
        self._calls.append(await Call.open(self.url, method, path, body, headers))
        return self._calls[-1]

    async def call(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Call:
        return await (await self.open(method, path, body, headers)).answered()

    async def get(self, path: str) -> Any:
        """The JSON of a GET that must succeed."""
        call = await self.call("GET", path)
        assert call.status == 200, await call.read()
        return await call.json()

    async def post(self, path: str, body: object) -> Any:
        """The JSON of a POST that must succeed."""
        call = await self.call("POST", path, body)
        assert call.status == 200, await call.read()
        return await call.json()

    async def complete(self, prompt: Prompt, max_tokens: int | None = 16, **more: Any) -> Result:
        """A whole completion, greedy and of full length if not said otherwise; of messages a chat completion."""
        body = await self.post(CHAT if is_chat(prompt) else COMPLETIONS, completion(prompt, max_tokens, **more))
        result = Result()
        result.take(body, body["choices"][0])
        return result

    async def stream(self, prompt: Prompt, max_tokens: int | None = 16, **more: Any) -> Stream:
        """The same streamed; returns when the request is sent."""
        more = {"stream": True, "stream_options": {"include_usage": True}, **more}
        path = CHAT if is_chat(prompt) else COMPLETIONS
        return Stream(await self.open("POST", path, completion(prompt, max_tokens, **more)))


class Served(Address):
    """A server in this process, whose machine can be looked at."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.url)
        self.server = server
        manager = server._manager
        assert manager is not None
        self.manager = manager

    def view(self) -> MachineView:
        return self.manager.view()

    def tap(self) -> Tap:
        return Tap(self.manager)

    async def until(self, condition: Callable[[MachineView], bool]) -> MachineView:
        """Wait until ``condition(view)``, looking whenever the server has answered a request in between."""
        while not condition(self.view()):
            await self.get("/health")
        return self.view()


def is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and isinstance(prompt[0], dict)


def completion(prompt: Prompt, max_tokens: int | None, **more: Any) -> dict[str, Any]:
    """A request's body: greedy, of full length, logprobs with an alternative, token ids given back."""
    body = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    if is_chat(prompt):
        return {"messages": prompt, **body, "logprobs": True, "top_logprobs": 2, **more}
    return {"prompt": prompt, **body, "logprobs": 2, **more}


async def cold(prompt: Prompt, max_tokens: int | None = 16, settings: Mapping[str, Any] | None = None, **more: Any) -> Result:
    """The same request alone on a fresh server: the oracle."""
    async with serving(**(settings or {})) as served:
        return await served.complete(prompt, max_tokens, **more)


def assert_same(result: Result, oracle: Result) -> None:
    """Equal tokens, but where the oracle's two best tokens were closer than ``SMALLEST_GAP``: from there on all may differ."""
    for token, expected, gap in zip(result.tokens, oracle.tokens, oracle.gaps, strict=True):
        if token != expected:
            assert gap < SMALLEST_GAP, f"token {token} instead of {expected}, which was ahead by {gap}"
            return
