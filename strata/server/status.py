"""What the server says about itself: health, readiness, slots, properties, version, metrics. Nothing here waits for the engine.

``/health`` is the process (503 only when the engine is dead for good: restart it); ``/ready`` is whether to send work here.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qs

from strata import __version__
from strata.errors import Unavailable
from strata.server.exchange import Exchange, Response, json_response
from strata.server.service import Service, Site


async def root(site: Site, exchange: Exchange) -> None:
    exchange.respond(json_response({"service": "strata", "version": __version__, "api": "/v1"}))


async def health(site: Site, exchange: Exchange) -> None:
    site.check_engine()
    exchange.respond(json_response({"status": "ok" if site.service is not None else "loading"}))


async def ready(site: Site, exchange: Exchange) -> None:
    site.check_ready()
    exchange.respond(json_response({"status": "ready"}))


async def version(site: Site, exchange: Exchange) -> None:
    exchange.respond(json_response({"version": __version__}))


async def metrics(site: Site, exchange: Exchange) -> None:
    if site.hardware is not None:
        await site.hardware.refresh()
    body, content_type = site.metrics.render(exchange.head.header("accept"))
    exchange.respond(Response(200, body, content_type))


async def slots(site: Site, exchange: Exchange) -> None:
    view = site.loaded().manager.view()
    if parse_qs(exchange.head.query).get("fail_on_no_slot", ["0"])[-1] not in ("0", "false", ""):
        if not any(slot.state in FREE for slot in view.slots):
            raise Unavailable("no slot is free", code="no_slot")
    exchange.respond(json_response([slot_object(slot) | memory_object(view) for slot in view.slots]))


FREE = ("empty", "held")


def slot_object(slot: Any) -> dict[str, object]:
    """llama.cpp's names where it has them, then ours. A held slot's ``n_prompt_tokens`` is its history."""
    return {
        "id": slot.id,
        "n_ctx": slot.n_ctx,
        "is_processing": slot.state not in FREE,
        "state": slot.state,
        "group": slot.group,
        "id_task": slot.request_id,
        "n_tokens": slot.tokens,
        "n_prompt_tokens": slot.prompt,
        "n_prompt_tokens_cache": slot.cached,
        "n_prompt_tokens_processed": slot.read,
        "n_decoded": slot.generated,
        "n_drafted": slot.drafted,
        "n_accepted": slot.accepted,
        "n_drafts": slot.drafts,
        "drafts_wanted": dict(zip(("mtp", "lookup"), slot.wanted)),
        "idle_seconds": slot.idle_s,
    }


async def props(site: Site, exchange: Exchange) -> None:
    service, settings = site.loaded(), site.settings
    model = service.model
    sampling = {
        name: getattr(settings, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    }
    exchange.respond(json_response({
        "default_generation_settings": {"n_ctx": model.context, "params": sampling},
        "total_slots": settings.batch,
        "model_alias": model.name,
        "model_path": model.file,
        "chat_template_caps": template_caps(service),
        "modalities": {"vision": False, "audio": False},
        "bos_token": token_name(service, service.tokenizer.bos),
        "eos_token": token_name(service, service.tokenizer.eos),
        "build_info": f"strata {__version__}",
    }))


def template_caps(service: Service) -> dict[str, bool]:
    template = service.template
    has_chat = template is not None and template.exists
    return {"supports_chat": has_chat, "supports_tools": template is not None and template.supports_tools}


def token_name(service: Service, token: int | None) -> str:
    return service.tokenizer.token_text(token) if token is not None else ""


async def v1_status(site: Site, exchange: Exchange) -> None:
    """One look for people: what /ready, /slots and /metrics say, in one object."""
    status: dict[str, object] = {
        "service": "strata",
        "version": __version__,
        "uptime_seconds": site.clock() - site.started,
        "loaded": site.service is not None,
        "draining": site.is_draining,
    }
    if site.service is not None:
        status |= machine_status(site.service)
    if site.hardware is not None:
        await site.hardware.refresh()
        status["devices"] = [asdict(device) for device in site.hardware.view()]
    exchange.respond(json_response(status))


def machine_status(service: Service) -> dict[str, object]:
    view = service.manager.view()
    states: dict[str, int] = {}
    for slot in view.slots:
        states[slot.state] = states.get(slot.state, 0) + 1
    return {
        "model": service.model.name,
        "context": service.model.context,
        "engine": "dead" if view.dead else "up",
        "requests": {"running": view.running, "waiting": view.waiting, "preempted": view.preempted},
        "slots": states,
        **memory_object(view),
    }


def memory_object(view: Any) -> dict[str, object]:
    """What all slots share: the pages of the device pool, and conversations that are kept without a slot."""
    return {
        "pages": {
            "total": view.pages_total, "free": view.pages_free, "busy": view.pages_busy, "held": view.pages_held,
            "shelved": view.pages_shelved, "tokens_per_page": view.page_tokens,
        },
        "conversations": {"shelved": view.shelved, "parked": view.parked, "parked_bytes": view.parked_bytes},
    }
