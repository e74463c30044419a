"""One HTTP request's way through the slot manager and out: submit, collect events, account, cancel. Subclasses write.

Events are put in a queue and handled once per turn of the loop, after whoever delivered them has gone on: so the engine gets
its next window before text is made, and what several windows brought leaves in one write. Every way of ending passes
``run``'s ``finally``, which cancels whatever is not over: a client that leaves, on any route, frees its slots there.

Each choice is accounted once, at its terminal event, which comes even after the client has left.
"""

from __future__ import annotations

import asyncio
from functools import partial

from strata.errors import EngineError, NotFinite
from strata.messages import Cancelled, Failed, Finished, NewTokens, Progress, RequestEvent, TokenLogprob, Usage
from strata.metric_table import EndReason
from strata.server.admission import Admitted
from strata.server.choice import Choice
from strata.server.exchange import Exchange
from strata.server.logprobs import CompletionLogprobs, chat_logprobs, joined
from strata.server.service import Service, Site
from strata.server.shapes import Style, timings_object, usage_object
from strata.text.detokenize import Detokenizer


class Answer:
    """The part that streamed and whole answers share. ``handle`` and ``complete`` are theirs."""

    def __init__(self, site: Site, service: Service, exchange: Exchange, admitted: Admitted, style: Style) -> None:
        self.site, self.service, self.exchange, self.admitted, self.style = site, service, exchange, admitted, style
        self.output = admitted.output
        self.choices = [
            Choice(n, request, Detokenizer(service.tokenizer, self.output.stops, self.output.keep_special), self.output)
            for n, request in enumerate(admitted.requests)
        ]
        self._lists = [CompletionLogprobs(service.tokenizer, self.output.keep_special) for _ in self.choices] if self._wants_lists else []
        self._loop = asyncio.get_running_loop()
        self._began = exchange.began if exchange.began is not None else site.clock()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._queue: list[tuple[Choice, RequestEvent]] = []
        self._open = len(self.choices)

    async def run(self) -> None:
        """Returns when the whole answer is written. Raises what the manager refuses with, or what the engine failed with."""
        manager = self.service.manager
        try:
            for choice, packed in zip(self.choices, self.admitted.packed):
                manager.submit(choice.request, partial(self._deliver, choice), packed)
                self.exchange.entry.open += 1
            await self._done
        finally:
            self._done.cancel()
            for choice in self.choices:
                if not choice.is_over:
                    manager.cancel(choice.request.id)

    # ---------------------------------------------------------------- events in

    def _deliver(self, choice: Choice, event: RequestEvent) -> None:
        if not self._queue:
            self._loop.call_soon(self._flush)
        self._queue.append((choice, event))

    def _flush(self) -> None:
        events, self._queue = self._queue, []
        try:
            for choice, event in events:
                self._handle(choice, event)
            if self._open:
                self.written()
            elif not self._done.done():
                self.complete()
                self._done.set_result(None)
        except Exception as bug:
            # The handler's task is where bugs are logged and answered.
            self._fail(bug)

    def _handle(self, choice: Choice, event: RequestEvent) -> None:
        if isinstance(event, NewTokens):
            self._take_tokens(choice, event)
        elif isinstance(event, Progress):
            choice.cached = event.cached
            self.progressed(choice, event)
        elif isinstance(event, Finished):
            choice.finish(event)
            self._account(choice, "stop" if choice.reason == "stop" else "length", event.slot)
            self._open -= 1
            self.finished(choice)
        elif isinstance(event, Failed):
            choice.fail(event)
            if isinstance(event.error, NotFinite):
                self.site.metrics.corrupted()
            self._account(choice, "error")
            self._fail(event.error)
        elif isinstance(event, Cancelled):
            error = EngineError("the server has cancelled this request")
            choice.fail(Failed(event.request_id, error, event.usage))
            self._account(choice, "abort", event.slot)
            self._fail(error)

    def _take_tokens(self, choice: Choice, event: NewTokens) -> None:
        now = self.site.clock()
        count = choice.take(event)
        if not count:
            return
        metrics = self.site.metrics
        metrics.generated(count)
        if choice.last_time is None:
            metrics.first_token(now - self._began)
        else:
            metrics.next_tokens(now - choice.last_time)
        choice.last_time = now
        if choice.stop_string is not None:
            self.service.manager.stop(choice.request.id)

    def _fail(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    def _account(self, choice: Choice, reason: EndReason, slot: int = -1) -> None:
        assert choice.usage is not None
        self.site.metrics.request_ended(reason, choice.usage, choice.generated, self.site.clock() - self._began)
        entry = self.exchange.entry
        entry.add(reason, slot, choice.usage)
        entry.closed_one()

    # ---------------------------------------------------------------- for the writers

    def written(self) -> None:
        """A batch of events has been handled, and some choice goes on."""

    def progressed(self, choice: Choice, event: Progress) -> None:
        """A part of a prompt was read."""

    def finished(self, choice: Choice) -> None:
        """A choice has ended well."""

    def complete(self) -> None:
        """All choices have ended well: write the rest and end the exchange."""
        raise NotImplementedError

    @property
    def _wants_lists(self) -> bool:
        return not self.style.chat and self.output.logprobs >= 0

    def prompt_of(self, choice: Choice) -> int:
        return choice.index // self.admitted.choices

    def opens_prompt(self, choice: Choice) -> bool:
        """Whether it is the first choice of its prompt: the one that counts the prompt's tokens."""
        return choice.index % self.admitted.choices == 0

    def logprobs_of(self, choice: Choice, with_prompt: bool) -> object:
        """What has come since the last call, in the style's shape; None where none were asked for."""
        if self.output.logprobs < 0:
            return None
        entries: list[TokenLogprob] = choice.take_logprobs()
        if self.style.chat:
            return chat_logprobs(self.service.tokenizer, entries)
        lists = self._lists[choice.index]
        if not with_prompt:
            return lists.answer(entries)
        prompt = lists.prompt(self.admitted.prompts[self.prompt_of(choice)], choice.take_prompt_logprobs())
        return joined(prompt, lists.answer(entries))

    def usage(self) -> dict[str, object]:
        """OpenAI's usage, so far or in the end: a prompt counts once however many choices it has."""
        usages = [choice.usage or Usage(len(choice.request.prompt), choice.cached) for choice in self.choices]
        first = [usage for usage, choice in zip(usages, self.choices) if self.opens_prompt(choice)]
        return usage_object(
            sum(usage.prompt for usage in first),
            sum(usage.cached for usage in first),
            sum(choice.generated for choice in self.choices),
            sum(usage.drafted for usage in usages),
            sum(usage.accepted for usage in usages),
        )

    def timings(self) -> dict[str, object]:
        usages = [choice.usage for choice in self.choices if choice.usage is not None]
        return timings_object(usages, sum(choice.generated for choice in self.choices))


def finish_members(choice: Choice) -> dict[str, object]:
    return {"finish_reason": choice.reason, "stop_reason": choice.stop_reason}
