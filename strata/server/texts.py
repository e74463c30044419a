"""Text and tokens without generating: /tokenize, /detokenize, /apply-template. All of it, the JSON too, on a worker thread."""

from __future__ import annotations

from collections.abc import Callable

from strata.server.exchange import Exchange, Response, json_response
from strata.server.fields import parse_object
from strata.server.prompts import read_chat, read_ids
from strata.server.service import Service, Site

MOST = 1 << 20  # characters of a text, or tokens: about a second's work, and the worker threads are few
PER_TOKEN = 8  # what would fit a longer context may be counted


def longest(service: Service) -> int:
    return max(MOST, PER_TOKEN * service.model.context)


async def tokenize(site: Site, exchange: Exchange) -> None:
    await _answer(site, exchange, tokens_of)


async def detokenize(site: Site, exchange: Exchange) -> None:
    await _answer(site, exchange, text_of)


async def apply_template(site: Site, exchange: Exchange) -> None:
    await _answer(site, exchange, prompt_of)


async def _answer(site: Site, exchange: Exchange, function: Callable[[bytes, Service], object]) -> None:
    service = site.loaded()

    def work() -> Response:
        return json_response(function(exchange.body, service))

    exchange.respond(await site.off_loop(work))


def tokens_of(body: bytes, service: Service) -> dict[str, object]:
    """llama.cpp's body (``content``), or vLLM's (``prompt`` or ``messages``), whose answer has a count too."""
    fields = parse_object(body)
    if fields.has("messages"):
        return _counted(list(read_chat(fields, service).tokens), service)
    name = "content" if fields.has("content") else "prompt"
    if not fields.has(name):
        raise fields.error("content", "the text to tokenise")
    text = fields.text(name, most=longest(service))
    special = fields.flag("add_special", False) if name == "content" else fields.flag("add_special_tokens", True)
    tokens = service.tokenizer.encode(text, add_special=special, parse_special=fields.flag("parse_special", True))
    if name == "prompt":
        return _counted(tokens, service)
    if not fields.flag("with_pieces", False):
        return {"tokens": tokens}
    return {"tokens": [{"id": token, "piece": _piece(service, token)} for token in tokens]}


def _counted(tokens: list[int], service: Service) -> dict[str, object]:
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.model.context}


def _piece(service: Service, token: int) -> str | list[int]:
    """The token's text; its bytes where they are not whole characters."""
    data = service.tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def text_of(body: bytes, service: Service) -> dict[str, object]:
    fields = parse_object(body)
    if not isinstance(fields.value("tokens"), list):
        raise fields.error("tokens", "a list of token ids")
    given = fields.items("tokens", longest(service))
    tokens = read_ids(fields, "tokens", given, service.tokenizer.vocab_size, "a list of token ids")
    return {"content": service.tokenizer.decode(tokens)}


def prompt_of(body: bytes, service: Service) -> dict[str, object]:
    return {"prompt": read_chat(parse_object(body), service).text}
