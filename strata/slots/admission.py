"""The door: what can be admitted at all, checked before anything changes."""

from __future__ import annotations

from collections.abc import Container

from strata.errors import ClientError, ContextExceeded
from strata.messages import EngineFacts
from strata.request import Request
from strata.slots.events import Arrive, IllegalEvent
from strata.slots.policy import SlotPolicy
from strata.slots.slot import Run


def check_request(request: Request, known: Container[str], policy: SlotPolicy, facts: EngineFacts, num_pages: int) -> None:
    """Raises ``ContextExceeded``, ``ClientError`` or (a request id in use, an empty prompt: bugs of the caller) ``IllegalEvent``."""
    if request.id in known or not request.id:
        raise IllegalEvent(f"request id {request.id!r} is empty or in use")
    prompt = len(request.prompt)
    if not prompt or request.max_tokens < 0:
        raise IllegalEvent("a request needs a prompt token and max_tokens >= 0")
    room = min(facts.context, num_pages * facts.page_tokens)
    if prompt + request.max_tokens > facts.context or prompt + min(1, request.max_tokens) > room:
        raise ContextExceeded(prompt, request.max_tokens, room)
    slot = request.placement.slot
    if slot is not None and not 0 <= slot < policy.slots:
        raise ClientError(f"id_slot must be 0 to {policy.slots - 1}, not {slot}.", param="id_slot")


def make_run(event: Arrive, order: int, policy: SlotPolicy, facts: EngineFacts, now: float) -> Run:
    request = event.request
    run = Run(request, event.packed, order, min(request.max_tokens, facts.context - len(request.prompt)), now)
    patience = request.deadline or policy.queue_timeout
    run.deadline = now + patience if patience else 0.0
    return run
