"""A machine and a fake engine joined by hand: what every test of the slot machine is written with."""

from __future__ import annotations

from strata.messages import (
    Cancelled, EngineFacts, Failed, Finished, NewTokens, PageCopy, Progress, Terminal, Tokens, Window,
)
from strata.request import Placement, Request, Sampling
from strata.slots.events import Arrive, Cancel, Command, Event, Trace
from strata.slots.machine import SlotMachine
from strata.slots.policy import SlotPolicy
from tests.slots.fake_engine import Drafter, FakeEngine, expected, facts


class House:
    """Carries commands to the fake engine and keeps what clients would have seen. Checks the books after every event."""

    def __init__(
        self, policy: SlotPolicy | None = None, snapshot_every: int = 0, eager: bool = False, drafter: Drafter | None = None,
        **changes: object,
    ) -> None:
        self.facts: EngineFacts = facts(**changes)
        self.machine = SlotMachine(self.facts, policy or SlotPolicy(slots=4))
        self.engine = FakeEngine(self.facts, snapshot_every, eager, drafter)
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[int]] = {}
        self.progress: dict[str, list[Progress]] = {}
        self.ended: dict[str, Terminal] = {}
        self.traces: list[Trace] = []
        self.windows: list[Window] = []
        self.copies: list[PageCopy] = []

    # ---- in

    def send(self, event: Event) -> list[Command]:
        commands = self.machine.receive(event, self.now)
        for command in commands:
            self._see(command)
        self.machine.check_integrity()
        return commands

    def ask(
        self, name: str, prompt: Tokens, max_tokens: int = 5, marks: Tokens = (), placement: Placement = Placement(), **more: object,
    ) -> Request:
        plain = {"sampling": Sampling(), "turn_marks": marks, "placement": placement, **more}
        request = Request(name, tuple(prompt), max_tokens, **plain)  # type: ignore[arg-type]
        self.send(Arrive(request))
        self.requests[name] = request
        return request

    def cancel(self, name: str) -> None:
        self.send(Cancel(name))

    def land(self, seconds: float = 0.0) -> list[Command]:
        self.now += seconds or 0.001
        return self.send(self.engine.land(seconds))

    def land_window(self, seconds: float = 0.0) -> list[Command]:
        self.now += seconds
        return self.send(self.engine.land_window(seconds))

    def run(self, limit: int = 100_000) -> None:
        """Land everything until nothing is in flight."""
        for _ in range(limit):
            if self.engine.is_idle:
                return
            self.land()
        raise AssertionError("the machine does not come to rest")

    def chat(self, name: str, prompt: Tokens, max_tokens: int = 5, marks: Tokens = (), **more: object) -> list[int]:
        """One request to its end; the answer is checked against a cold run."""
        self.ask(name, prompt, max_tokens, marks, **more)  # type: ignore[arg-type]
        self.run()
        self.check(name)
        return self.tokens.get(name, [])

    def chat_beside(self, name: str, prompt: Tokens, max_tokens: int = 5, **more: object) -> list[int]:
        """One request to its end while others go on."""
        self.ask(name, prompt, max_tokens, **more)  # type: ignore[arg-type]
        while name not in self.ended:
            self.land()
        self.check(name)
        return self.tokens.get(name, [])

    # ---- out

    def _see(self, command: Command) -> None:
        if isinstance(command, (Window, PageCopy)):
            if isinstance(command, Window):
                self._look_at(command)
                self.windows.append(command)
            else:
                self.copies.append(command)
            self.engine.take(command)
            return
        if isinstance(command, Trace):
            self.traces.append(command)
            return
        assert command.request_id not in self.ended, f"{command} after the end"
        if isinstance(command, NewTokens):
            self.tokens.setdefault(command.request_id, []).extend(command.tokens)
            self.logprobs.setdefault(command.request_id, []).extend(one.token for one in command.prompt_logprobs)
        elif isinstance(command, Progress):
            self.progress.setdefault(command.request_id, []).append(command)
        else:
            self.ended[command.request_id] = command

    def _look_at(self, window: Window) -> None:
        """Drafts never make a window too large, nor an answer too long, and have pages to be written to."""
        if window.kind == "decode":
            assert sum(len(segment.tokens) for segment in window.segments) <= self.facts.max_rows
        for segment in window.segments:
            limits = segment.draft_limits
            assert max(segment.num_drafts, limits.mtp, limits.lookup) <= self.facts.max_drafts
            assert segment.end <= len(segment.pages) * self.facts.page_tokens
            request = self.requests.get(segment.request_id)
            if request is not None:
                left = request.max_tokens - len(self.tokens.get(request.id, ()))
                assert segment.num_drafts < max(1, left) and max(limits.mtp, limits.lookup) <= max(0, left - 2)

    def check(self, name: str) -> None:
        """The request has finished, with the tokens of a cold run."""
        terminal = self.ended.get(name)
        assert isinstance(terminal, Finished), f"{name} ended with {terminal}"
        answer = self.tokens.get(name, [])
        full = expected(self.requests[name], self.facts.context - len(self.requests[name].prompt))
        assert answer == full[:len(answer)] if terminal.reason == "length" else answer == full
        assert terminal.usage.generated == len(answer)

    # ---- looks

    def cached(self, name: str) -> int:
        return self.ended[name].usage.cached if name in self.ended else self.progress[name][0].cached

    def slot(self, name: str) -> int:
        return self.progress[name][0].slot

    def states(self) -> list[str]:
        return [slot.state.value for slot in self.machine.slots]

    def error(self, name: str) -> Exception:
        terminal = self.ended[name]
        assert isinstance(terminal, Failed)
        return terminal.error

    def was_cancelled(self, name: str) -> bool:
        return isinstance(self.ended.get(name), Cancelled)
