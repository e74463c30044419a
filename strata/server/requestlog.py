"""One log line for each HTTP request: who, what, how it ended, what it cost. No prompt, no key, no raw path.

The line is made from values of our own (route templates, numbers, checked ids), so a client cannot write into the log; what
is left of its making is escaped all the same. Polls (``/health``, ``/metrics`` ...) are logged at debug level.
"""

from __future__ import annotations

import logging

from strata.server.exchange import Exchange

log = logging.getLogger("strata.request")

QUIET = frozenset({"/", "/health", "/ready", "/metrics", "/slots", "/v1/status", "/version"})


def write_line(exchange: Exchange, seconds: float) -> None:
    """Log it as text; the record carries ``fields`` too, for whoever writes a log of objects (console.JsonFormatter)."""
    level = logging.DEBUG if exchange.route in QUIET and exchange.status in (200, 503) else logging.INFO
    if log.isEnabledFor(level):
        facts = request_facts(exchange, seconds)
        log.log(level, "%s", as_text(facts), extra={"event": "request", "fields": facts})


def request_facts(exchange: Exchange, seconds: float) -> dict[str, object]:
    """The line's content, in its order. ``status`` 0: the client left before there was one."""
    facts: dict[str, object] = {
        "request": exchange.head.id,
        "client": exchange.head.client,
        "method": exchange.head.method,
        "route": exchange.route,
        "status": exchange.status,
        "ms": round(seconds * 1e3, 1),
        "bytes": exchange.sent,
    }
    if exchange.error is not None:
        facts["error"] = exchange.error.code or exchange.error.type
    entry = exchange.entry
    if entry.usage is None:
        return facts
    usage = entry.usage
    return facts | {
        "end": entry.end,
        "slot": entry.slot,
        "reused": usage.cached,
        "read": usage.prompt - usage.cached,
        "generated": usage.generated,
        "drafted": usage.drafted,
        "accepted": usage.accepted,
        "queue_ms": round(usage.queue_s * 1e3, 1),
        "prompt_ms": round(usage.prompt_s * 1e3, 1),
        "decode_ms": round(usage.decode_s * 1e3, 1),
    }


def as_text(facts: dict[str, object]) -> str:
    return " ".join(f"{name}={escaped(str(value)) or '-'}" for name, value in facts.items())


def escaped(text: str) -> str:
    """Without line breaks, terminal codes and blanks."""
    return "".join(c if c.isprintable() and c != " " else c.encode("unicode_escape").decode() if c != " " else "_" for c in text)
