"""Rules and dashboard name only what the server has: metrics, labels, label values, settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from strata.config import TABLE
from strata.metric_table import METRICS, STATUS_CLASSES
from strata.server import routes
from tests.monitoring.kit import (
    KIT, PROMETHEUS_OWN, RULES, TARGET_LABELS, dashboard, exposition, expressions, grouping_labels, panels, rules, samples, selectors,
)

RECORDED = set(rules(RULES[0]))
ALERTS = set(rules(RULES[1]))
# Constants: to compute with (positions per page, the queue's cap), and to tell two servers apart.
NOT_SHOWN = {"strata_page_tokens", "strata_queue_limit", "strata_config_info"}
RECORDED_LABELS = {"finished_reason", "status"}
VALUES = {
    "status": set(STATUS_CLASSES),
    "route": {path for _, path, _ in routes.TABLE},
    "job": {"strata"},
}


def values_of(metric: str, label: str) -> set[str]:
    """What a label of a metric can say; a recorded series takes its labels from metrics, so any of theirs."""
    tables = [each for each in METRICS if each.label == label and (metric in RECORDED or metric.startswith(each.name))]
    return VALUES.get(label) or {value for each in tables for value in each.values}


by_expression = pytest.mark.parametrize(("where", "query"), [pytest.param(*each, id=each[0]) for each in expressions()])


@by_expression
def test_every_metric_exists(where: str, query: str) -> None:
    names = {name for name, _ in selectors(query)}
    assert names and names <= samples().keys() | RECORDED | PROMETHEUS_OWN


@by_expression
def test_every_label_exists(where: str, query: str) -> None:
    for name, matchers in selectors(query):
        own = RECORDED_LABELS if name in RECORDED else samples().get(name, frozenset())
        assert {label for label, _, _ in matchers} <= TARGET_LABELS | own, name
    everywhere = TARGET_LABELS.union(*samples().values())
    assert grouping_labels(query) <= everywhere


@by_expression
def test_every_label_value_exists(where: str, query: str) -> None:
    for name, matchers in selectors(query):
        for label, _, value in matchers:
            if label not in ("instance", "model_name"):
                assert set(value.split("|")) <= values_of(name, label), (name, label)


@by_expression
def test_only_servers_of_strata_are_asked(where: str, query: str) -> None:
    """vLLM's names are vLLM's too: another server in the same Prometheus must not raise our alerts."""
    for name, matchers in selectors(query):
        assert ("job", "=", "strata") in matchers, name


@pytest.mark.parametrize("path", sorted(KIT.rglob("*.*")), ids=lambda path: path.name)
def test_every_flag_exists(path: Path) -> None:
    flags = {row.flag for row in TABLE}
    for line in path.read_text(encoding="utf-8").splitlines():
        if "--config.file" not in line and "--storage." not in line and "--web." not in line:
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", line)) <= flags, line


def test_the_servers_openmetrics_says_the_same() -> None:
    """promtool reads the classic format only; this parser is the strict one of OpenMetrics."""
    accept = "application/openmetrics-text; version=1.0.0"
    families = text_string_to_metric_families(exposition(accept).decode())
    assert {sample.name for family in families for sample in family.samples} == samples().keys()


def test_what_is_recorded_is_well_named() -> None:
    """level:metric:operations, as Prometheus' own guide has it; nobody exposes such a name."""
    assert len(RECORDED) > 15
    for name in RECORDED:
        assert re.fullmatch(r"instance(?:_status|_reason)?:strata_[a-z_]+:[a-z0-9_]+", name)


def test_the_alerts_that_people_count_on_are_there() -> None:
    assert ALERTS >= {
        "StrataDown", "StrataNotReady", "StrataEngineDead", "StrataQueueLong", "StrataFirstTokenSlow", "StrataTokensSlow",
        "StrataHistoriesEvicted", "StrataHitShareDropped", "StrataDraftsLose", "StrataPagesFull",
    }


def test_every_metric_of_the_server_is_on_the_dashboard_or_said_to_be_left_out() -> None:
    """A counter that nobody looks at is a hint that a panel is missing."""
    shown = {name for panel in panels() for target in panel["targets"] for name, _ in selectors(target["expr"])}
    shown = {re.sub(r"_(?:total|bucket|sum|count)$", "", name) for name in shown}
    assert {each.name for each in METRICS} - shown == NOT_SHOWN


def test_the_scanner_reads_promql() -> None:
    query = 'sum by (job, le) (rate(a:b_total{x="1",y!~"p|q"}[5m])) / on (job) group_left c > 0.5 and d unless on (job) e{}'
    assert selectors(query) == [("a:b_total", [("x", "=", "1"), ("y", "!~", "p|q")]), ("c", []), ("d", []), ("e", [])]
    assert grouping_labels(query) == {"job", "le"}


def test_the_scanner_sees_every_rule() -> None:
    for path in RULES:
        assert len(rules(path)) == len(re.findall(r"^ +expr:", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert dashboard()["panels"]
