"""The one stop-string filter: lets text through, holds back what may still become a stop string, and ends at the first that does.

Rule. The stop string whose *last* character comes first ends the text; of two that end at the same character, the longer. So
the outcome depends on the text alone, never on how it was cut into pieces. The text before the match is delivered.

An Aho-Corasick automaton over all stop strings (Aho and Corasick, 1975): its state after a character is the longest suffix of
the text that begins some stop string, which is exactly what must be held back. One step a character, however many stops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from strata.errors import ClientError


class StopFilter:
    """``stopped`` is the stop string that matched, or None."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ``ClientError`` for an empty stop string."""
        if not all(stops):
            raise ClientError("A stop string must not be empty.", param="stop")
        self._next, self._fail, self._depth, self._match = _automaton(stops)
        self._state = 0
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The text that may go out now. Empty after a match."""
        if self.stopped is not None:
            return ""
        if len(self._next) == 1:
            return text
        held = self._held + text
        for done, char in enumerate(text, len(self._held) + 1):
            self._state = self._step(char)
            stop = self._match[self._state]
            if stop is not None:
                self.stopped, self._held = stop, ""
                return held[: done - len(stop)]
        keep = len(held) - self._depth[self._state]
        self._held = held[keep:]
        return held[:keep]

    def flush(self) -> str:
        """What is still held: the text has ended, so it is no beginning of a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, char: str) -> int:
        state = self._state
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)


def _automaton(stops: Sequence[str]) -> tuple[list[dict[str, int]], list[int], list[int], list[str | None]]:
    """Per state: its edges, the state of its longest proper suffix, its length, and the longest stop string that ends there."""
    edges: list[dict[str, int]] = [{}]
    fail, depth = [0], [0]
    match: list[str | None] = [None]
    for stop in stops:
        state = 0
        for char in stop:
            if char not in edges[state]:
                edges[state][char] = len(edges)
                edges.append({})
                fail.append(0)
                depth.append(depth[state] + 1)
                match.append(None)
            state = edges[state][char]
        match[state] = stop
    queue = deque(edges[0].values())
    while queue:
        state = queue.popleft()
        for char, child in edges[state].items():
            back = fail[state]
            while back and char not in edges[back]:
                back = fail[back]
            fail[child] = edges[back].get(char, 0)
            match[child] = match[child] or match[fail[child]]
            queue.append(child)
    return edges, fail, depth, match
