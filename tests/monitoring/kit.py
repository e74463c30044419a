"""The monitoring kit as its tests see it: files, expressions and the names in them, and what a server really exposes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata.engine.stage import StageTimes
from strata.hardware import DeviceView
from strata.messages import Usage
from strata.metric_table import CONFIG_LABELS
from strata.metrics import Metrics
from strata.server.service import ServerView
from strata.slots.view import Counters, MachineView, SlotView

ROOT = Path(__file__).resolve().parent.parent.parent
KIT = ROOT / "configs" / "monitoring"
RULES = (KIT / "rules" / "recording.yml", KIT / "rules" / "alerts.yml")
DASHBOARD = KIT / "grafana" / "dashboards" / "strata.json"

# Prometheus makes these itself for every target.
PROMETHEUS_OWN = {"up", "scrape_duration_seconds"}
TARGET_LABELS = {"job", "instance"}
KEYWORDS = {"and", "or", "unless", "group_left", "group_right", "bool", "offset"}


def tool(name: str) -> str:
    """A program of Debian's package prometheus. Where it is absent the test is skipped; with STRATA_TEST_PROMETHEUS=required it fails."""
    found = shutil.which(name)
    if found is None:
        absent = pytest.fail if os.environ.get("STRATA_TEST_PROMETHEUS") == "required" else pytest.skip
        absent(f"{name} is not installed: apt-get install prometheus")
    return found


def promtool(*arguments: object, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([tool("promtool"), *map(str, arguments)], input=stdin, capture_output=True, timeout=60)


# ---------------------------------------------------------------- the kit


def rules(path: Path) -> dict[str, str]:
    """Name of each recording or alert -> its expression. The files are YAML of one simple form, which a promtool test checks."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {}
    for part in re.split(r"^ +- (?:alert|record): ", text, flags=re.MULTILINE)[1:]:
        match = re.match(r"(\S+)\n +expr: (?:\|\n)?((?:.|\n)+?)(?:\n +(?:for|labels|annotations):|\n\n|\n?\Z)", part)
        assert match is not None, part
        found[match[1]] = match[2].strip()
    return found


@cache
def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def panels() -> list[Any]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def filled_in(query: str) -> str:
    """A dashboard's expression as Grafana sends it."""
    return query.replace("$__rate_interval", "1m").replace("$instance", ".+").replace("$model", ".+")


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of every rule, panel and variable of the kit."""
    for path in RULES:
        yield from rules(path).items()
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], filled_in(target["expr"])
    for variable in dashboard()["templating"]["list"]:
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable.get("definition", ""))
        if match is not None:
            yield variable["name"], f"sum by ({match[2]}) ({filled_in(match[1])})"


# ---------------------------------------------------------------- PromQL, as far as names go


def selectors(query: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """(metric, [(label, operator, value), ...]) of each selector in an expression."""
    query = re.sub(r"\[[^]]*\]", "", query)
    query = re.sub(r"\b(?:by|on|ignoring|without)\s*\([^)]*\)", "", query)
    found = []
    for match in re.finditer(r"([A-Za-z_:][\w:]*)\s*(\{[^}]*\}|\()?", query):
        name, rest = match[1], match[2] or ""
        if rest == "(" or name in KEYWORDS:
            continue
        found.append((name, re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', rest)))
    return found


def grouping_labels(query: str) -> set[str]:
    lists = re.findall(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)", query)
    return {label.strip() for each in lists for label in each.split(",")}


# ---------------------------------------------------------------- the server


def view() -> MachineView:
    """A machine with one held slot."""
    slots = (SlotView(0, 0, "held", 40, 512),)
    return MachineView(
        slots=slots, running=0, waiting=0, preempted=0, windows_in_flight=0, pages_total=8, pages_free=5, pages_busy=0, pages_held=3,
        pages_shelved=0, page_tokens=16, tokens_held=40, shelved=0, parked=0, parked_bytes=0, parked_limit=0, draining=False, dead="",
        counters=Counters(),
    )


def exposition(accept: str = "") -> bytes:
    """What /metrics says after one request of each end."""
    metrics = Metrics("tiny", "1.0", view)
    config = dict.fromkeys(CONFIG_LABELS, "")
    metrics.server = lambda: ServerView(True, 1, 64, {"total": 2.0, "available": 1.0}, config)
    metrics.engine = lambda: (StageTimes("stage 0", 3.0, 1.0, 5),)
    metrics.devices = lambda: (DeviceView("0", 7, 5, 3, 24, 9, 0.5, 60.0, 250.0),)
    metrics.corrupted()
    metrics.loop_lag(0.001)
    metrics.first_token(0.2)
    metrics.generated(1)
    metrics.next_tokens(0.05)
    metrics.generated(2)
    for reason in ("stop", "length", "abort", "error"):
        metrics.request_ended(reason, Usage(prompt=9, cached=4, generated=3, drafted=2, accepted=1, queue_s=0.1), 3, 0.5)
    metrics.http_request("/v1/completions", 200, 0.5)
    metrics.http_request("/v1/completions", 0, 0.1)
    return metrics.render(accept)[0]


@cache
def samples() -> Mapping[str, frozenset[str]]:
    """Name of each series -> its label names, as an independent parser reads them."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return {name: frozenset(labels) for name, labels in found.items()}
