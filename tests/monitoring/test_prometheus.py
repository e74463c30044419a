"""A real Prometheus scrapes a running server: what it stores is what the server counted, and every rule and panel can be computed."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

from strata.app import Server
from strata.config import Settings
from tests.monitoring.kit import KIT, RULES, expressions, filled_in, panels, rules, tool

MODEL = Path(__file__).parent.parent / "data" / "tiny" / "llama-iq3s.gguf"
KEY = "a-key-of-the-tests"
PATIENCE = 200.0  # a loaded machine; nothing here waits for time to pass


def fetch(url: str, body: Any = None) -> Any:
    """JSON from ``url``, which is POSTed to where there is a body."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with urlopen(Request(url, None if body is None else json.dumps(body).encode(), headers), timeout=PATIENCE) as answer:
        return json.load(answer)


async def until(question: Callable[[], Any], log: Path) -> Any:
    """The first answer that is neither empty nor a refusal. Another process's progress can only be asked for; ``log`` is its account."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    answer = None
    while not answer:
        assert loop.time() < deadline, log.read_text(encoding="utf-8")
        with suppress(OSError):  # it answers 503 until it has opened its store
            answer = await asyncio.to_thread(question)
        await asyncio.sleep(0.05)
    return answer


class Prometheus:
    """One with the kit's config, but for the target, the key file and the intervals."""

    def __init__(self, folder: Path, target: str, config: str) -> None:
        self.log = folder / "log"
        folder.mkdir()
        shutil.copytree(KIT, folder / "kit")
        (folder / "kit" / "strata.key").write_text(KEY + "\n", encoding="utf-8")
        path = folder / "kit" / config
        text = path.read_text(encoding="utf-8")
        assert "127.0.0.1:8080" in text and "15s" in text
        path.write_text(text.replace("127.0.0.1:8080", target).replace("15s", "1s"), encoding="utf-8")
        self.address = ""
        self._command = [
            tool("prometheus"), f"--config.file={path}", "--web.listen-address=127.0.0.1:0", f"--storage.tsdb.path={folder / 'data'}",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Returns when it listens, on a port of its choice that its log names."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        found = await until(lambda: re.search(r'"Listening on".*address=(127\S+)', self.log.read_text(encoding="utf-8")), self.log)
        self.address = found[1]

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def api(self, path: str) -> Any:
        answer = fetch(f"http://{self.address}/api/v1/{path}")
        assert answer["status"] == "success"
        return answer["data"]

    def value(self, query: str) -> float | None:
        """Of an expression with one result; None where there is none yet."""
        result = self.api(f"query?query={quote(query)}")["result"]
        return float(result[0]["value"][1]) if result else None


@asynccontextmanager
async def scraped(folder: Path, config: str, **settings: Any) -> AsyncIterator[tuple[Server, Prometheus]]:
    tool("prometheus")
    async with Server(Settings(model=MODEL, model_name="tiny", port=0, batch=2, context=128, **settings)) as server:
        prometheus = Prometheus(folder, server.url.removeprefix("http://"), config)
        try:
            await prometheus.start()
            yield server, prometheus
        finally:
            prometheus.stop()


async def test_a_real_prometheus_with_and_without_a_key(tmp_path: Path) -> None:
    """At the same time: Prometheus takes five seconds before it scrapes for the first time."""
    await asyncio.gather(
        what_the_client_saw_is_what_it_stores(tmp_path / "open"),
        a_server_with_a_key_is_scraped(tmp_path / "key"),
    )


async def what_the_client_saw_is_what_it_stores(folder: Path) -> None:
    async with scraped(folder, "prometheus.yml") as (server, prometheus):
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 6, "ignore_eos": True}
        usage = (await asyncio.to_thread(fetch, f"{server.url}/v1/completions", body))["usage"]
        assert usage["completion_tokens"] == 6
        tokens = 'vllm:generation_tokens_total{job="strata",model_name="tiny"}'
        assert await until(lambda: prometheus.value(tokens), prometheus.log) == 6
        assert prometheus.value("up") == 1
        assert prometheus.value('vllm:prompt_tokens_total{job="strata"}') == usage["prompt_tokens"]
        assert prometheus.value('vllm:request_success_total{finished_reason="length"}') == 1
        assert prometheus.value("vllm:time_to_first_token_seconds_count") == 1
        assert prometheus.value('sum(strata_slots{state="held"})') == 1
        await every_rule_is_healthy(prometheus)
        every_panel_has_data(prometheus)


async def a_server_with_a_key_is_scraped(folder: Path) -> None:
    async with scraped(folder, "prometheus-with-key.yml", api_key=KEY) as (_, prometheus):
        assert await until(lambda: prometheus.value("up"), prometheus.log) == 1


async def every_rule_is_healthy(prometheus: Prometheus) -> None:
    """Each has been computed without an error, and no alert that waits for nothing fires."""
    def computed() -> list[Any]:
        found = [rule for group in prometheus.api("rules")["groups"] for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else []

    found = await until(computed, prometheus.log)
    assert {rule["name"] for rule in found} == {name for path in RULES for name in rules(path)}
    assert [(rule["name"], rule.get("lastError")) for rule in found if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in found if rule.get("state") == "firing"] == []


def every_panel_has_data(prometheus: Prometheus) -> None:
    """Rates need two scrapes; so ask for gauges now, and for the rest only that Prometheus can compute it."""
    for _, query in expressions():
        prometheus.api(f"query?query={quote(query)}")
    gauges = [target["expr"] for panel in panels() for target in panel["targets"] if "rate(" not in target["expr"]]
    gauges = [query for query in gauges if not re.search(r"strata_gpu_", query)]  # no GPU here
    assert len(gauges) > 10
    missing = [query for query in gauges if prometheus.value(filled_in(query)) is None]
    assert not missing, "\n".join(missing)
