"""Keys from a file, and whose history a key may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.serving import COMPLETIONS, Served, completion, serving, some_tokens


async def status(served: Served, headers: dict[str, str], path: str = COMPLETIONS) -> int:
    method = "POST" if path == COMPLETIONS else "GET"
    return (await served.call(method, path, completion(some_tokens(5), 2) if method == "POST" else None, headers)).status


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst-key\n\n  second-key  \n")
    path.chmod(0o600)
    return path


async def test_a_key_of_the_file_opens_and_nothing_else(keys: Path) -> None:
    async with serving(api_key_file=keys) as served:
        for name, value in (("Authorization", "Bearer first-key"), ("x-api-key", "second-key"), ("api-key", "first-key")):
            assert await status(served, {name: value}) == 200
        for wrong in ("", "Bearer", "Bearer first", "Bearer first-key2", "Basic first-key", "Bearer # of the team"):
            assert await status(served, {"Authorization": wrong}) == 401
        for path in ("/v1/models", "/slots", "/metrics", "/v1/status"):
            assert await status(served, {}, path) == 401
            assert await status(served, {"Authorization": "Bearer first-key"}, path) == 200
        assert await status(served, {}, "/health") == await status(served, {}, "/ready") == 200


async def test_nobody_uses_the_history_of_another_key(keys: Path) -> None:
    """How fast a prompt is read would tell whether another client has sent it."""
    body = completion(some_tokens(200), 2)
    async with serving(api_key_file=keys) as served:
        cached = []
        for key in ("first-key", "second-key", "first-key"):
            call = await served.call("POST", COMPLETIONS, body, {"Authorization": f"Bearer {key}"})
            cached.append((await call.json())["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 192]
