"""A scripted engine: the real slot manager runs on it, and a test decides what it says and when.

``script(segment, position)`` names the token for a position of the answer (0 is the first). In manual mode a window is answered
when the test calls ``step``. Logprobs are a fixed proper distribution that depends on the position, so each position has its own.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from strata.messages import (
    CopyDone,
    EngineEvent,
    EngineFacts,
    EngineFailed,
    PageCopy,
    Segment,
    SegmentResult,
    TokenLogprob,
    Window,
    WindowDone,
)

Script = Callable[[Segment, int], int]


def says(tokens: Sequence[int], end: int) -> Script:
    """``tokens`` and then ``end`` for ever."""
    return lambda segment, position: tokens[position] if position < len(tokens) else end


def distribution(token: int, position: int, count: int) -> TokenLogprob:
    """``token`` has half of the mass, the next ids a quarter, an eighth ...; which ids follow depends on the position."""
    others = [((token + 1 + position % 3 + n) % 512, math.log(0.5 ** (n + 2))) for n in range(max(0, count - 1))]
    return TokenLogprob(token, math.log(0.5), ((token, math.log(0.5)), *others)[:count])


class ScriptedEngine:
    """Implements ``strata.messages.Engine``. ``windows``: those not answered yet, in order; ``seen``: all there were."""

    def __init__(self, script: Script, context: int = 256, is_manual: bool = False) -> None:
        self.facts = EngineFacts(num_pages=1024, page_tokens=16, context=context, chunk=32)
        self.script = script
        self.is_manual = is_manual
        self.windows: list[Window] = []
        self.seen: list[Window] = []
        self.is_closed = False
        self._origins: dict[str, int] = {}
        self._deliver: Callable[[EngineEvent], None] = lambda event: None

    def start(self, deliver: Callable[[EngineEvent], None]) -> None:
        self._deliver = deliver

    def submit(self, window: Window) -> None:
        self.windows.append(window)
        self.seen.append(window)
        if not self.is_manual:
            asyncio.get_running_loop().call_soon(self.step)

    def copy(self, copy: PageCopy) -> None:
        """There are no pages to copy: it is done at once."""
        if copy.direction != "drop":
            asyncio.get_running_loop().call_soon(self._deliver, CopyDone(copy.id))

    def close(self) -> None:
        self.is_closed = True

    def step(self, error: str = "") -> None:
        """Answer the oldest window; ``error``: as the fate of each of its rows."""
        window = self.windows.pop(0)
        results = (SegmentResult(error=error) if error else self._result(segment) for segment in window.segments)
        self._deliver(WindowDone(window.id, tuple(results), 0.001))

    def fail(self, message: str, dead: bool = False) -> None:
        """Lose the oldest window, or everything."""
        window = self.windows.pop(0) if self.windows else None
        self._deliver(EngineFailed(message, () if dead or window is None else (window.id,)))

    def _result(self, segment: Segment) -> SegmentResult:
        prompt_logprobs = self._prompt_logprobs(segment)
        if segment.sampling is None:
            return SegmentResult(prompt_logprobs=prompt_logprobs)
        position = segment.end - self._origins.setdefault(segment.request_id, segment.end)
        token = self.script(segment, position)
        wanted = segment.sampling.logprobs
        logprobs = (distribution(token, position, wanted),) if wanted >= 0 else ()
        return SegmentResult((token,), logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _prompt_logprobs(self, segment: Segment) -> tuple[TokenLogprob, ...]:
        if segment.prompt_logprobs < 0:
            return ()
        following = [*segment.tokens[1:], segment.next_token]
        return tuple(
            distribution(token, segment.start + n, segment.prompt_logprobs) for n, token in enumerate(following) if token is not None
        )
