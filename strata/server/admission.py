"""From a body's bytes to requests for the slot manager: every refusal that depends on the request is made here.

Runs on a worker thread, as one pure function of body, settings and model (a seed is drawn where none was given). Nothing has
been written to the client yet, so every refusal has its own status.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from strata.config.settings import Settings
from strata.errors import ClientError, ContextExceeded, NotFound
from strata.request import Request
from strata.server.exchange import Head
from strata.server.fields import Fields, parse_object
from strata.server.guard import Guard
from strata.server.parameters import MAX_LOGPROBS, Output, Parameters, read_parameters, with_logprobs, with_session
from strata.server.prompts import Prompt, read_chat, read_prompts
from strata.server.service import Service
from strata.slots import pack

COMPLETION_TOKENS = 16  # OpenAI's contract where max_tokens is absent; chat has what is left of the context
MAX_SEQUENCES = 256  # choices of all prompts of one HTTP request


@dataclass(frozen=True, slots=True)
class Admitted:
    """One HTTP request, ready to run. Request i is choice ``i % choices`` of prompt ``i // choices``; ``packed``: each one's
    prompt as the slot machine compares it, made here because it takes long for long prompts."""

    id: str
    requests: tuple[Request, ...]
    packed: tuple[bytes, ...]
    prompts: tuple[Prompt, ...]
    choices: int
    output: Output
    seed: int


def admit_completion(body: bytes, head: Head, service: Service, settings: Settings, guard: Guard) -> Admitted:
    fields = _open(body, head, service, settings)
    parameters = read_parameters(fields, settings, service.model.vocab_size)
    _check_completion(fields, parameters)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    parameters = with_logprobs(parameters, -1 if logprobs is None else logprobs)
    parameters = replace(parameters, output=replace(parameters.output, echo=fields.flag("echo", False)))
    tenant = guard.tenant(head, parameters.cache_salt)
    return _admit("cmpl", read_prompts(fields, service), parameters, service, tenant, most_sequences(settings))


def admit_chat(body: bytes, head: Head, service: Service, settings: Settings, guard: Guard) -> Admitted:
    fields = _open(body, head, service, settings)
    parameters = read_parameters(fields, settings, service.model.vocab_size)
    wanted = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    has_logprobs = fields.flag("logprobs", False)
    if wanted and not has_logprobs:
        raise ClientError("top_logprobs needs logprobs to be true", param="top_logprobs")
    parameters = with_logprobs(parameters, (wanted or 0) if has_logprobs else -1)
    tenant = guard.tenant(head, parameters.cache_salt)
    return _admit("chatcmpl", [read_chat(fields, service)], parameters, service, tenant, most_sequences(settings))


def most_sequences(settings: Settings) -> int:
    """More than slots and queue hold could never be admitted, however often the client came back."""
    return min(MAX_SEQUENCES, settings.batch + settings.queue_size)


def _open(body: bytes, head: Head, service: Service, settings: Settings) -> Fields:
    fields = with_session(parse_object(body), head.header("x-session-id"))
    check_model(fields.text("model"), service, settings)
    return fields


def check_model(name: str, service: Service, settings: Settings) -> None:
    """Raise ``NotFound`` for another model, where the settings are strict about it."""
    if name and settings.strict_model and name not in (service.model.name, *service.model.aliases):
        raise NotFound("this model is not served here: GET /v1/models names the one that is", param="model", code="model_not_found")


def _check_completion(fields: Fields, parameters: Parameters) -> None:
    best_of = fields.integer("best_of", 1)
    if best_of is not None and best_of != parameters.choices:
        raise ClientError("best_of must equal n: picking the best of more answers is not supported", param="best_of")
    if fields.text("suffix", most=2**31):
        raise ClientError("suffix is not supported: this model only continues a text", param="suffix")


def _admit(kind: str, prompts: list[Prompt], parameters: Parameters, service: Service, tenant: str, most: int) -> Admitted:
    if len(prompts) * parameters.choices > most:
        raise ClientError(f"n times the number of prompts may be at most {most}", param="n")
    answer_id = f"{kind}-{secrets.token_hex(12)}"
    parameters = replace(parameters, placement=replace(parameters.placement, tenant=tenant))
    requests: list[Request] = []
    packed: list[bytes] = []
    for prompt in prompts:
        max_tokens = _max_tokens(kind, prompt, parameters, service.model.context)
        first = _request(f"{answer_id}-{len(requests)}", prompt, max_tokens, parameters, service)
        requests.append(first)
        packed += [pack(prompt.tokens)] * parameters.choices
        for choice in range(1, parameters.choices):
            sampling = replace(first.sampling, choice=choice)
            requests.append(replace(first, id=f"{answer_id}-{len(requests)}", sampling=sampling))
    return Admitted(
        answer_id, tuple(requests), tuple(packed), tuple(prompts), parameters.choices, parameters.output, parameters.sampling.seed
    )


def _max_tokens(kind: str, prompt: Prompt, parameters: Parameters, context: int) -> int:
    """Raises ``ContextExceeded``: nothing is cut to make it fit but the default."""
    room = context - len(prompt.tokens)
    wanted = parameters.max_tokens
    if room < 0 or (wanted or 0) > room:
        raise ContextExceeded(len(prompt.tokens), wanted or 0, context)
    if wanted is not None:
        return wanted
    return min(COMPLETION_TOKENS, room) if kind == "cmpl" else room


def _request(request_id: str, prompt: Prompt, max_tokens: int, parameters: Parameters, service: Service) -> Request:
    end_tokens = frozenset() if parameters.ignore_eos else service.tokenizer.end_tokens
    return Request(
        id=request_id,
        prompt=prompt.tokens,
        max_tokens=max_tokens,
        sampling=parameters.sampling,
        stop_tokens=end_tokens | parameters.output.stop_token_ids,
        turn_marks=prompt.turn_marks,
        placement=parameters.placement,
        prompt_logprobs=parameters.output.logprobs if parameters.output.echo else -1,
    )
