"""The dashboard is one that Grafana loads and shows whole: ids, places, references, variables."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import pytest

from tests.monitoring.kit import KIT, dashboard, panels

UNITS = {"none", "s", "percentunit", "bytes", "celsius", "watt"}
by_panel = pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])


def variables() -> dict[str, Any]:
    return {variable["name"]: variable for variable in dashboard()["templating"]["list"]}


def test_it_has_its_rows() -> None:
    rows = [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"]
    assert rows == ["Overview", "Slots and KV", "Pipeline", "Machine", "Drafting", "HTTP"]


def test_grafana_may_provision_it() -> None:
    """No id of some database, a uid of its own, a schema that Grafana 11 and later read without migration of panels."""
    assert "id" not in dashboard()
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", dashboard()["uid"]) and dashboard()["schemaVersion"] >= 39
    provider = (KIT / "grafana" / "provisioning" / "dashboards" / "strata.yml").read_text(encoding="utf-8")
    compose = (KIT / "compose.yml").read_text(encoding="utf-8")
    path = re.search(r"path: (\S+)", provider)
    assert path is not None and f"./grafana/dashboards:{path[1]}:ro" in compose


def test_ids_are_unique() -> None:
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids) and min(ids) > 0


def test_titles_are_unique() -> None:
    titles = [panel["title"] for panel in dashboard()["panels"]]
    assert len(set(titles)) == len(titles)


def test_no_panel_covers_another() -> None:
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    for place in places:
        assert place["x"] >= 0 and place["w"] > 0 and place["h"] > 0 and place["x"] + place["w"] <= 24
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


def test_panels_stand_below_their_row() -> None:
    tops = [panel["gridPos"]["y"] for panel in dashboard()["panels"]]
    assert tops == sorted(tops)


def test_variables_come_in_the_order_they_need_each_other() -> None:
    assert list(variables()) == ["datasource", "model", "instance"]
    assert variables()["datasource"]["type"] == "datasource"
    assert "$model" in variables()["instance"]["query"]["query"]
    for name in ("model", "instance"):
        # On every change of the time range: a server that came later is found.
        assert variables()[name]["refresh"] == 2 and variables()[name]["includeAll"] and variables()[name]["multi"]


@by_panel
def test_a_panel_asks_the_chosen_data_source_for_the_chosen_servers(panel: Any) -> None:
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        for name in re.findall(r"\$\{?(\w+)", target["expr"]):
            assert name in variables() or name == "__rate_interval"
        assert target["expr"].count("{") == target["expr"].count('instance=~"$instance"')


@by_panel
def test_a_panel_can_be_read(panel: Any) -> None:
    assert panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert all(target["legendFormat"] for target in panel["targets"])
    letters = [target["refId"] for target in panel["targets"]]
    assert letters == sorted(set(letters)) and letters
    for target in panel["targets"]:
        grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert any(label in group for group in grouped) or target["expr"].startswith("strata_build_info")


@by_panel
def test_counters_are_shown_as_rates(panel: Any) -> None:
    for target in panel["targets"]:
        for match in re.finditer(r"(\w+\()?[\w:]+_(?:total|bucket|sum|count)\{[^}]*\}(\[\$__rate_interval\])?", target["expr"]):
            assert match[1] == "rate(" and match[2]
