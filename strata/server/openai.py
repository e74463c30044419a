"""The OpenAI routes: completions, chat completions, models. JSON becomes requests in admission.py, events become JSON in answer.py."""

from __future__ import annotations

from typing import Protocol

from strata.config.settings import Settings
from strata.errors import NotFound
from strata.server.admission import Admitted, admit_chat, admit_completion
from strata.server.exchange import Exchange, Head, json_response
from strata.server.guard import Guard
from strata.server.service import Service, Site
from strata.server.shapes import CHAT, COMPLETION, Style
from strata.server.stream import StreamedAnswer
from strata.server.whole import WholeAnswer


class Admit(Protocol):
    def __call__(self, body: bytes, head: Head, service: Service, settings: Settings, guard: Guard) -> Admitted: ...


async def completions(site: Site, exchange: Exchange) -> None:
    await _generate(site, exchange, admit_completion, COMPLETION)


async def chat_completions(site: Site, exchange: Exchange) -> None:
    await _generate(site, exchange, admit_chat, CHAT)


async def _generate(site: Site, exchange: Exchange, admit: Admit, style: Style) -> None:
    service = site.working()
    body, exchange.body = exchange.body, b""
    admitted = await site.off_loop(admit, body, exchange.head, service, site.settings, site.guard)
    key = admitted.requests[0].placement.key
    if exchange.head.header("x-session-id") and key.isascii() and key.isprintable():
        exchange.headers = (*exchange.headers, ("X-Session-ID", key))
    writer = StreamedAnswer if admitted.output.stream else WholeAnswer
    await writer(site, service, exchange, admitted, style).run()


async def models(site: Site, exchange: Exchange) -> None:
    entries = [model_object(site.loaded(), name) for name in _names(site.loaded())]
    # Codex reads `models`, everybody else `data`.
    exchange.respond(json_response({"object": "list", "data": entries, "models": entries}))


async def model(site: Site, exchange: Exchange) -> None:
    service = site.loaded()
    if exchange.argument not in _names(service):
        raise NotFound("no such model: GET /v1/models names the one that is served", param="model", code="model_not_found")
    exchange.respond(json_response(model_object(service, exchange.argument)))


def _names(service: Service) -> tuple[str, ...]:
    return (service.model.name, *service.model.aliases)


def model_object(service: Service, name: str) -> dict[str, object]:
    facts = service.model
    return {
        "id": name,
        "object": "model",
        "created": facts.created,
        "owned_by": "strata",
        "max_model_len": facts.context,
        "meta": {
            "n_ctx": facts.context,
            "n_ctx_train": facts.trained_context,
            "n_vocab": facts.vocab_size,
            "n_params": facts.parameters,
            "size": facts.file_bytes,
            "architecture": facts.architecture,
        },
    }
