"""No network but the port: the server starts and answers where every other address and every name look-up is forbidden."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.process import launched
from tests.e2e.serving import some_tokens

# Set up before anything of the server is imported; what is forbidden is written down, in case somebody swallows the error.
FORBID = """
import atexit, ipaddress, socket, sys
broken = []
def forbid(what):
    broken.append(str(what))
    raise PermissionError(f"outbound network: {what}")
def is_local(address):
    return not isinstance(address, tuple) or ipaddress.ip_address(address[0]).is_loopback
real = socket.socket
class Guarded(real):
    def connect(self, address):
        return super().connect(address) if is_local(address) else forbid(address)
    def connect_ex(self, address):
        return super().connect_ex(address) if is_local(address) else forbid(address)
    def sendto(self, data, *rest):
        return super().sendto(data, *rest) if is_local(rest[-1]) else forbid(rest[-1])
socket.socket = Guarded
def local_only(look_up):
    def guarded(host, *rest, **more):
        name = host.decode() if isinstance(host, bytes) else host
        return look_up(host, *rest, **more) if name in (None, "", "localhost", "127.0.0.1", "::1") else forbid(host)
    return guarded
for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr"):
    setattr(socket, name, local_only(getattr(socket, name)))
sys.modules["uvloop"] = None  # its sockets are not Python's
clients = ("huggingface_hub", "hf_xet", "httpx", "requests", "urllib3", "aiohttp", "transformers")
def report():
    print("FORBIDDEN", broken, [name for name in clients if name in sys.modules], file=sys.stderr)
atexit.register(report)
"""


@pytest.mark.skipif(os.name == "nt", reason="the report at the end needs a process that can be told to end")
async def test_starts_and_answers_without_a_network(tiny_chat: Path) -> None:
    async with launched(before=FORBID, model=tiny_chat) as process:
        await process.until_ready()
        await process.complete(some_tokens(20))
        await process.complete([{"role": "user", "content": "Hello"}])
        for path in ("/metrics", "/slots", "/v1/models", "/props", "/v1/status"):
            assert (await process.call("GET", path)).status == 200
        process.signal(signal.SIGTERM)
        assert await process.ended() == 0
    assert process.log[-1] == "FORBIDDEN [] []"


@pytest.mark.parametrize("attempt", [
    "socket.create_connection(('192.0.2.1', 9), 1)", "socket.socket().connect_ex(('192.0.2.1', 9))",
    "socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('192.0.2.1', 9))", "socket.gethostbyname('example.org')",
])
def test_the_ban_bites(attempt: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"{FORBID}\n{attempt}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "outbound network" in done.stderr and "FORBIDDEN [\"" in done.stderr.replace("'", '"')
