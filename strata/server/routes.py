"""Which handler answers which method and path: one table. Guard, CORS, metrics and log line are applied to every route here.

Paths come with slashes merged and no trailing one; a base URL without ``/v1`` works for what OpenAI's clients call. HEAD is
GET without the body; OPTIONS is CORS' and needs no key. What is not in the table is 404, with an error object, never 200.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from strata.errors import (
    ContextExceeded,
    EngineError,
    Forbidden,
    HeadersTooLarge,
    MethodNotAllowed,
    NotFound,
    StrataError,
    TooLarge,
    Unauthorized,
)
from strata.server import openai, requestlog, status, texts
from strata.server.exchange import Exchange
from strata.server.heartbeat import Heartbeat
from strata.server.service import Site

Handler = Callable[[Site, Exchange], Awaitable[None]]

TABLE: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/", status.root),
    ("GET", "/health", status.health),
    ("GET", "/ready", status.ready),
    ("GET", "/version", status.version),
    ("GET", "/metrics", status.metrics),
    ("GET", "/slots", status.slots),
    ("GET", "/props", status.props),
    ("GET", "/v1/status", status.v1_status),
    ("GET", "/v1/models", openai.models),
    ("GET", "/v1/models/{id}", openai.model),
    ("POST", "/v1/completions", openai.completions),
    ("POST", "/v1/chat/completions", openai.chat_completions),
    ("POST", "/tokenize", texts.tokenize),
    ("POST", "/detokenize", texts.detokenize),
    ("POST", "/apply-template", texts.apply_template),
)
# Health probes have no key; the rest needs one where keys are set.
NEEDS_NO_KEY = frozenset({"/", "/health", "/ready"})
ALIASES = {
    "/models": "/v1/models",
    "/models/{id}": "/v1/models/{id}",
    "/completions": "/v1/completions",
    "/chat/completions": "/v1/chat/completions",
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
}
ARGUMENT = "{id}"


def refusal(error: StrataError) -> str:
    """The reason under which an error is counted: one of ``strata.metric_table.REFUSALS``."""
    if error.code in ("queue_full", "loading", "draining", "engine_dead"):
        return str(error.code)
    if isinstance(error, ContextExceeded):
        return "context"
    if isinstance(error, (TooLarge, HeadersTooLarge)):
        return "too_large"
    if isinstance(error, (Unauthorized, Forbidden)):
        return "access"
    return "engine" if isinstance(error, EngineError) else "other"


class Routes:
    """The ``Application`` behind the connections."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._heartbeat = Heartbeat(site.metrics.loop_lag)
        self._handlers: dict[str, dict[str, Handler]] = {}
        for method, path, handler in TABLE:
            self._handlers.setdefault(path, {})[method] = handler
        site.metrics.know_routes((*self._handlers, "other"))
        templates = [*self._handlers, *ALIASES]
        self._exact = {path: ALIASES.get(path, path) for path in templates if ARGUMENT not in path}
        self._prefixes = {path.removesuffix(ARGUMENT): ALIASES.get(path, path) for path in templates if ARGUMENT in path}

    def started(self, connections: Callable[[], int]) -> None:
        """The listener listens; ``connections`` counts the open ones."""
        self._site.connections = connections
        self._heartbeat.start()

    def stopped(self) -> None:
        self._heartbeat.stop()

    def begin(self, exchange: Exchange) -> None:
        """Route and guard, before the body is read. Raises ``StrataError``, which is answered with the headers set here."""
        exchange.began = self._site.clock()
        head, guard = exchange.head, self._site.guard
        exchange.headers = (*exchange.headers, *guard.cors_headers(head))
        guard.check_source(head)
        if head.method == "OPTIONS":
            exchange.handler = self._preflight
            return
        self._find(exchange)
        if exchange.route not in NEEDS_NO_KEY:
            guard.check_key(head)

    def finished(self, exchange: Exchange) -> None:
        """Count the request, and log it now or when the last of its choices has ended."""
        seconds = self._site.clock() - exchange.began if exchange.began is not None else 0.0
        self._site.metrics.http_request(exchange.route, exchange.status, seconds)
        if exchange.error is not None:
            self._site.metrics.refused(refusal(exchange.error))
        write = partial(requestlog.write_line, exchange, seconds)
        if exchange.entry.open:
            exchange.entry.write = write
        else:
            write()

    def _find(self, exchange: Exchange) -> None:
        path = exchange.head.path
        template = self._exact.get(path)
        for prefix, with_argument in self._prefixes.items():
            if template is None and path.startswith(prefix):
                template, exchange.argument = with_argument, path[len(prefix):]
        if template is None:
            raise NotFound("no such route; docs/API.md lists what there is", code="not_found")
        exchange.route = template
        handlers = self._handlers[template]
        handler = handlers.get("GET" if exchange.head.method == "HEAD" else exchange.head.method)
        if handler is None:
            allowed = ", ".join((*handlers, *(["HEAD"] if "GET" in handlers else []), "OPTIONS"))
            exchange.headers = (*exchange.headers, ("Allow", allowed))
            raise MethodNotAllowed(f"this route takes {allowed}")
        exchange.handler = partial(handler, self._site)

    async def _preflight(self, exchange: Exchange) -> None:
        exchange.respond(self._site.guard.preflight(exchange.head))
