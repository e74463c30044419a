"""Who may call: API keys, the Host and Origin headers, and CORS.

Keys are kept as SHA-256 digests; a given key is compared with every one of them in constant time. Without a key the server is
open to whoever reaches the port, so on a loopback address two more doors are shut, because a web page in a browser of this
machine reaches it too: a Host header that is not ours (DNS rebinding), and an Origin that is neither local nor configured
(a form or script of a foreign page can POST without asking first). With keys the page would need one.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import stat
from pathlib import Path

from strata.config.settings import Settings
from strata.errors import Forbidden, StartError, Unauthorized
from strata.server.exchange import Head, Headers, Response

log = logging.getLogger("strata.server")

_HEADER_LIST = re.compile(r"[A-Za-z0-9_, -]{1,1024}")
EXPOSED = "X-Request-ID, X-Session-ID, Retry-After"


def read_keys(settings: Settings) -> tuple[bytes, ...]:
    """SHA-256 digests of every key in ``api_key`` and ``api_key_file``. Raises ``StartError``."""
    keys = [settings.api_key] if settings.api_key is not None else []
    if settings.api_key_file is not None:
        keys += _keys_in(settings.api_key_file)
    if any(not key.strip() for key in keys):
        raise StartError("the API key is empty: set a key, or leave STRATA_API_KEY out")
    return tuple(sorted({_digest(key.strip().encode()) for key in keys}))


def _keys_in(path: Path) -> list[str]:
    try:
        mode = path.stat().st_mode
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StartError(f"cannot read the API keys in {path}: {reason}; api_key_file names a text file with a key in each line") from error
    if os.name == "posix" and mode & stat.S_IROTH:
        log.warning("every user of this machine can read the API keys in %s (chmod 600 would stop that)", path)
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise StartError(f"there is no API key in {path}: write one on each line")
    return keys


def check_exposure(settings: Settings, keys: tuple[bytes, ...]) -> None:
    """Raise ``StartError`` for a server that strangers could reach and use."""
    if not keys and not is_loopback(settings.host) and not settings.allow_remote_without_key:
        raise StartError(
            f"{settings.host} can be reached from other machines and no API key is set: "
            "give --api-key-file or STRATA_API_KEY, listen on 127.0.0.1, or allow it with --allow-remote-without-key"
        )


def is_loopback(host: str) -> bool:
    """A name or address that only this machine reaches."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return is_address(host) and ipaddress.ip_address(host).is_loopback


def is_address(host: str) -> bool:
    """An IP address, which needs no DNS and so cannot be rebound."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Guard:
    """The rules above for one server."""

    def __init__(self, settings: Settings, keys: tuple[bytes, ...]) -> None:
        self._keys = keys
        self._is_local = is_loopback(settings.host)
        self._hosts = {host.lower() for host in settings.allowed_hosts} | {settings.host.lower()}
        self._checks_host = bool(settings.allowed_hosts) or (self._is_local and not keys)
        self._origins = {origin.rstrip("/").lower() for origin in settings.cors_origins}

    def check_source(self, head: Head) -> None:
        """Raise ``Forbidden`` for a foreign Host or Origin."""
        if self._checks_host and not self._knows_host(head.header("host")):
            raise Forbidden("this Host is not served here; add its name to allowed_hosts to allow it")
        if not self._keys and head.method != "OPTIONS" and "origin" in head.headers and not self._allows_origin(head):
            raise Forbidden("this Origin may not call the server; add it to cors_origins to allow it")

    def check_key(self, head: Head) -> None:
        """Raise ``Unauthorized`` unless a key of ours comes with the request, or none is needed."""
        if not self._keys:
            return
        given = _digest(given_key(head).encode("latin-1"))
        # Every key is compared, so that the time says nothing about which one came close.
        if not sum(hmac.compare_digest(given, key) for key in self._keys):
            raise Unauthorized("a valid API key is needed: send it as 'Authorization: Bearer KEY'")

    def tenant(self, head: Head, salt: str) -> str:
        """Whose history the request may reuse: with several keys each has its own; ``salt`` splits further."""
        if len(self._keys) < 2 and not salt:
            return ""
        key = given_key(head) if len(self._keys) > 1 else ""
        return _digest(f"{key}\n{salt}".encode())[:16].hex()

    def cors_headers(self, head: Head) -> Headers:
        origin = head.header("origin")
        if not origin:
            return ()
        if not self._allows_origin(head):
            return (("Vary", "Origin"),)
        return (("Access-Control-Allow-Origin", origin), ("Access-Control-Expose-Headers", EXPOSED), ("Vary", "Origin"))

    def preflight(self, head: Head) -> Response:
        """The answer to OPTIONS, which browsers send without a key."""
        if not head.header("origin") or not self._allows_origin(head):
            return Response(204, headers=(("Allow", "GET, HEAD, POST, OPTIONS"),))
        wanted = head.header("access-control-request-headers")
        headers: Headers = (
            ("Access-Control-Allow-Methods", "GET, HEAD, POST, OPTIONS"),
            ("Access-Control-Allow-Headers", wanted if _HEADER_LIST.fullmatch(wanted) else "Authorization, Content-Type"),
            ("Access-Control-Max-Age", "600"),
        )
        if head.header("access-control-request-private-network") == "true":
            headers = (*headers, ("Access-Control-Allow-Private-Network", "true"))
        return Response(204, headers=headers)

    def _knows_host(self, host_header: str) -> bool:
        # HTTP/1.0 probes send none; browsers, which the check is about, always do.
        host = host_of(host_header)
        return not host_header or "*" in self._hosts or is_loopback(host) or host in self._hosts

    def _allows_origin(self, head: Head) -> bool:
        origin = head.header("origin").rstrip("/").lower()
        if not origin.isascii():  # no browser sends one, and it could not be sent back in a header
            return False
        if "*" in self._origins or origin in self._origins:
            return True
        netloc = origin.partition("://")[2]
        host = host_of(netloc)
        if self._is_local and is_loopback(host):
            return True
        # A page of our own. A name proves nothing without a key: it may have been pointed here a moment ago.
        is_ours = bool(self._keys) or host in self._hosts or is_address(host)
        return bool(host) and is_ours and netloc == head.header("host").lower()


def host_of(netloc: str) -> str:
    """Host without port: ``[::1]:80`` -> ``::1``."""
    netloc = netloc.strip().lower()
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0]
    return netloc.partition(":")[0].rstrip(".")


def given_key(head: Head) -> str:
    """The key a client sent, in any of the three headers that clients use; "" for none."""
    scheme, _, token = head.header("authorization").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return (head.header("x-api-key") or head.header("api-key")).strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
