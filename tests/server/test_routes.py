"""Routing, keys, CORS, the Host and Origin checks, and what the server says about itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from strata.config.settings import Settings
from strata.errors import StartError
from strata.server import texts
from strata.server.guard import check_exposure, is_loopback, read_keys
from strata.server.head import clean_path, origin_form
from strata.server.routes import ALIASES, TABLE
from tests.server.harness import World, settle

CHAT = "/v1/chat/completions"
KEY = "right-key-1"


def keyed(**more: object) -> World:
    return World(settings=Settings(batch=4, api_key=KEY, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/models", "/v1//models", "//models", "/v1/models/", "/models", "/v1/models?x=1"])
async def test_slashes_and_aliases(path: str) -> None:
    answer = await World().get(path)
    assert answer.status == 200 and answer.json["data"][0]["id"] == "tiny"


@pytest.mark.parametrize("path", ["/v1/v1/models", "/v1/nosuch", "/v1", "/healthz", "/v1/models/other", "/%ff", "/..%2f..%2fetc/passwd"])
async def test_unknown_paths_are_404_with_an_error_object(path: str) -> None:
    answer = await World().get(path)
    assert answer.status == 404 and set(answer.error) == {"message", "type", "param", "code"}


async def test_model_by_id_even_with_a_slash() -> None:
    world = World(settings=Settings(batch=4, aliases=("org/tiny",)))
    world.load()
    assert world.site.service is not None
    assert (await world.get("/v1/models/tiny")).json["max_model_len"] == 256
    assert (await world.get("/v1/models/org/tiny")).status == 404, "the service's names count, not the settings'"


async def test_wrong_method_names_the_right_one() -> None:
    answer = await World().get(CHAT)
    assert answer.status == 405 and "POST" in answer.headers["allow"]
    assert (await World().post("/health", {})).status == 405


async def test_every_route_of_the_table_answers() -> None:
    world = World()
    for method, path, _ in TABLE:
        answer = await world.connect().request(method, path.replace("{id}", "tiny"), {} if method == "POST" else None)
        assert answer.status in (200, 400), path
        assert answer.headers["x-request-id"]
    assert set(ALIASES.values()) <= {path for _, path, _ in TABLE}


async def test_a_text_that_would_hold_a_worker_for_long_is_refused() -> None:
    world = World()
    for path, body in (("/tokenize", {"content": "a" * (texts.MOST + 1)}), ("/detokenize", {"tokens": [5] * (texts.MOST + 1)})):
        answer = await world.post(path, body)
        assert answer.status == 400 and str(texts.MOST) in answer.error["message"]
    assert len((await world.post("/tokenize", {"content": "a" * 5000})).json["tokens"]) == 5000, "more than the context is no fault"
    assert world.site.service is not None
    assert texts.longest(replace(world.site.service, model=replace(world.site.service.model, context=1 << 20))) == 1 << 23


async def test_a_session_id_that_is_too_long_is_refused_not_cut() -> None:
    """Cut, two of them could become the same conversation."""
    answer = await World().post("/v1/completions", {"prompt": "x", "max_tokens": 1}, X_Session_ID="a" * 1023 + " b")
    assert answer.status == 400 and answer.error["param"] == "session_id"


async def test_a_request_id_is_kept_if_it_is_harmless() -> None:
    assert (await World().get("/health", X_Request_ID="job-17.a")).headers["x-request-id"] == "job-17.a"
    assert (await World().get("/health", X_Request_ID='<b>"')).headers["x-request-id"] != '<b>"'


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("headers", [
    {"Authorization": f"Bearer {KEY}"}, {"Authorization": f"bearer  {KEY}"}, {"x_api_key": KEY}, {"api_key": KEY},
])
async def test_right_key_in_any_header(headers: dict[str, str]) -> None:
    assert (await keyed().get("/v1/models", **headers)).status == 200


@pytest.mark.parametrize("headers", [
    {}, {"Authorization": f"Basic {KEY}"}, {"Authorization": "Bearer"}, {"Authorization": "Bearer right-key-2"}, {"x_api_key": "wrong"},
])
async def test_wrong_or_no_key(headers: dict[str, str]) -> None:
    answer = await keyed().get("/v1/models", **headers)
    assert answer.status == 401 and answer.error["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/metrics", "/slots", "/props", "/v1/status", "/version"])
async def test_every_route_but_the_probes_needs_the_key(path: str) -> None:
    world = keyed()
    assert (await world.get(path)).status == 401
    assert (await world.get("/health")).status == (await world.get("/ready")).status == 200


async def test_no_body_is_read_without_a_key() -> None:
    client = keyed().connect()
    client.send(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 30000000\r\nExpect: 100-continue\r\n\r\n")
    await settle()
    assert client.transport.sent.startswith(b"HTTP/1.1 401")


def test_keys_from_file_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\nfirst\nsecond \n", encoding="utf-8")
    path.chmod(0o600)
    assert len(read_keys(Settings(api_key="third", api_key_file=path))) == 3
    path.write_text("# none\n", encoding="utf-8")
    with pytest.raises(StartError, match="no API key in"):
        read_keys(Settings(api_key_file=path))
    with pytest.raises(StartError, match="cannot read"):
        read_keys(Settings(api_key_file=tmp_path / "missing"))


def test_a_reachable_address_without_a_key_does_not_start() -> None:
    with pytest.raises(StartError, match="--api-key-file"):
        check_exposure(Settings(host="0.0.0.0"), ())
    check_exposure(Settings(host="0.0.0.0", allow_remote_without_key=True), ())
    check_exposure(Settings(host="0.0.0.0"), (b"digest",))
    for host in ("127.0.0.1", "localhost", "::1", "127.3.3.3"):
        check_exposure(Settings(host=host), ())
    assert not is_loopback("localhost.evil.example")


async def test_several_keys_do_not_share_history(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\ntwo\n", encoding="utf-8")
    world = World(settings=Settings(batch=4, api_key_file=path))
    body = {"prompt": "a secret of one's own, and long enough to be worth keeping", "max_tokens": 1}

    async def cached(key: str, **more: object) -> int:
        answer = await world.post("/v1/completions", {**body, **more}, x_api_key=key)
        return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [await cached("one"), await cached("two")] == [0, 0]
    assert await cached("one") > 0
    assert await cached("one", cache_salt="apart") == 0


# ---------------------------------------------------------------- browsers


async def test_preflight_needs_no_key() -> None:
    world = keyed(cors_origins=("https://ui.example",))
    answer = await world.connect().request(
        "OPTIONS", CHAT, Origin="https://ui.example", Access_Control_Request_Method="POST",
        Access_Control_Request_Headers="authorization,content-type",
    )
    assert answer.status == 204 and answer.body == b"" and "content-length" not in answer.headers
    assert answer.headers["access-control-allow-origin"] == "https://ui.example"
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"


async def test_preflight_of_a_stranger_allows_nothing() -> None:
    answer = await World().connect().request("OPTIONS", CHAT, Origin="https://evil.example", Access_Control_Request_Headers="authorization")
    assert answer.status == 204 and not any(name.startswith("access-control-allow") for name in answer.headers)


async def test_errors_carry_cors_headers() -> None:
    world = keyed(cors_origins=("*",))
    for answer in (await world.get("/v1/models", Origin="https://a.example"), await world.get("/nosuch", Origin="https://a.example")):
        assert answer.status in (401, 404) and answer.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize("host, status", [
    ("127.0.0.1:8080", 200), ("localhost", 200), ("[::1]:8080", 200), ("x.localhost", 200), ("rebound.example", 403),
    ("127.0.0.1.evil.example", 403), ("ours.example:80", 200),
])
async def test_foreign_hosts_are_refused_on_a_keyless_loopback(host: str, status: int) -> None:
    world = World(settings=Settings(batch=4, allowed_hosts=("ours.example",)))
    client = world.connect()
    client.send(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    await settle()
    assert client.transport.sent.startswith(b"HTTP/1.1 %d" % status)


@pytest.mark.parametrize("origin, status", [
    ("https://evil.example", 403), ("null", 403), ("http://[", 403), ("http://localhost:3000", 200), ("http://127.0.0.1", 200),
])
async def test_pages_of_strangers_cannot_post_without_a_key(origin: str, status: int) -> None:
    answer = await World().post("/tokenize", {"content": "x"}, Origin=origin, Content_Type="text/plain")
    assert answer.status == status


@pytest.mark.parametrize("origins, status", [((), 403), (("*",), 403)])
async def test_an_origin_that_no_header_could_carry_back(origins: tuple[str, ...], status: int) -> None:
    client = World(settings=Settings(batch=4, cors_origins=origins)).connect()
    client.send("GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://localhost:\xe9\r\n\r\n".encode("latin-1"))
    await settle()
    assert client.transport.sent.startswith(b"HTTP/1.1 %d" % status)


@pytest.mark.parametrize("host, status", [("192.0.2.7:8080", 200), ("gpu.example:8080", 200), ("rebound.example:8080", 403)])
async def test_a_page_of_our_own_on_an_open_network(host: str, status: int) -> None:
    settings = Settings(batch=4, host="0.0.0.0", allow_remote_without_key=True, allowed_hosts=("gpu.example", "*"))
    world = World(settings=settings)
    client = world.connect()
    head = f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nContent-Length: 15\r\n\r\n"
    client.send(head.encode() + b'{"content":"x"}')
    await settle()
    assert client.transport.sent.startswith(b"HTTP/1.1 %d" % status)


# ---------------------------------------------------------------- the server about itself


async def test_loading_draining_dead() -> None:
    world = World(loaded=False)
    assert (await world.get("/health")).json == {"status": "loading"}
    loading = await world.post(CHAT, {"messages": []})
    assert loading.status == (await world.get("/ready")).status == 503
    assert loading.error["code"] == "loading" and loading.headers["retry-after"] == "1"
    world.load()
    assert (await world.get("/ready")).json == {"status": "ready"}
    world.site.is_draining = True
    draining = await world.post("/v1/completions", {"prompt": "x"})
    assert draining.status == (await world.get("/ready")).status == 503 and draining.error["code"] == "draining"
    assert (await world.get("/health")).status == 200
    world.site.is_draining = False
    world.engine.fail("stage 0 is gone", dead=True)
    await settle()
    for path in ("/health", "/ready"):
        assert (await world.get(path)).status == 503
    assert (await world.post("/v1/completions", {"prompt": "x"})).error["code"] == "engine_dead"


async def test_slots_and_fail_on_no_slot() -> None:
    world = World()
    world.engine.is_manual = True
    idle = (await world.get("/slots?fail_on_no_slot=1")).json
    assert [slot["id"] for slot in idle] == [0, 1, 2, 3] and not any(slot["is_processing"] for slot in idle)
    for n in range(4):
        await world.connect().start("POST", "/v1/completions", {"prompt": f"{n}"})
    await settle()
    assert (await world.get("/slots?fail_on_no_slot=1")).status == 503
    busy = (await world.get("/slots")).json
    assert all(slot["is_processing"] and slot["n_ctx"] == 256 for slot in busy)
    status = (await world.get("/v1/status")).json
    assert status["requests"]["running"] == 4 and status["slots"] == {"reading": 4}


async def test_props_and_version() -> None:
    props = (await World().get("/props")).json
    assert props["default_generation_settings"]["n_ctx"] == 256 and props["total_slots"] == 4
    assert props["bos_token"] == "<s>" and props["model_path"] == "tiny.gguf"
    assert set((await World().get("/version")).json) == {"version"}


async def test_tokenize_and_back() -> None:
    world = World()
    text = "Grüße 🚀"
    ids = (await world.post("/tokenize", {"content": text})).json["tokens"]
    assert (await world.post("/detokenize", {"tokens": ids})).json == {"content": text}
    pieces = (await world.post("/tokenize", {"content": "ü", "with_pieces": True})).json["tokens"]
    assert [piece["piece"] for piece in pieces] == [[0xC3], [0xBC]]
    counted = (await world.post("/v1/tokenize", {"prompt": "abc"})).json
    assert counted["count"] == len(counted["tokens"]) and counted["max_model_len"] == 256
    assert (await world.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json["count"] == len("user: x\n")
    assert (await world.post("/apply-template", {"messages": [{"role": "user", "content": "x"}]})).json == {"prompt": "user: x\n"}
    for body in ({}, {"content": 5}, {"content": None}):
        assert (await world.post("/tokenize", body)).status == 400
    for tokens in (None, "x", [1, 512], [-1], [True], [1.5]):
        assert (await world.post("/detokenize", {"tokens": tokens})).status == 400


def test_paths() -> None:
    assert clean_path("/a//b/") == "/a/b" and clean_path("/") == "/" and clean_path("/a%2Fb") == "/a/b"
    assert origin_form("http://h/a?b") == "/a?b" and origin_form("http://h?b") == "/?b" and origin_form("/a?u=http://x") == "/a?u=http://x"
