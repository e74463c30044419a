"""An answer in one piece: collected to its end, then written as one JSON object."""

from __future__ import annotations

import time

from strata.server.answer import Answer, finish_members
from strata.server.choice import Choice
from strata.server.exchange import Response, json_response
from strata.server.shapes import envelope


class WholeAnswer(Answer):
    """See the head of this file."""

    async def run(self) -> None:
        await super().run()
        # Logprobs of a long prompt or answer are millions of entries: too long for the loop's thread.
        has_much = self.output.logprobs >= 0
        self.exchange.respond(await self.site.off_loop(self._make) if has_much else self._make())

    def complete(self) -> None:
        """``run`` goes on from here."""

    def _make(self) -> Response:
        model = self.service.model.name
        answer = envelope(self.admitted.id, self.style.whole, int(time.time()), model, self.site.fingerprint)
        answer["choices"] = [self._choice(choice) for choice in self.choices]
        answer["usage"] = self.usage()
        answer["timings"] = self.timings()
        answer["seed"] = self.admitted.seed
        return json_response(answer)

    def _choice(self, choice: Choice) -> dict[str, object]:
        text = choice.take_text()
        if self.output.echo:
            text = self.admitted.prompts[self.prompt_of(choice)].text + text
        more = {"logprobs": self.logprobs_of(choice, with_prompt=self.output.echo), **finish_members(choice)}
        if self.output.token_ids:
            more["prompt_token_ids"] = list(choice.request.prompt)
            more["token_ids"] = choice.take_ids()
        return self.style.whole_choice(choice.index, text, more)
