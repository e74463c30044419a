"""promtool's verdict: configs, rules, the server's real output, the alerts' unit tests, and every expression of the dashboard."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.monitoring.kit import KIT, RULES, exposition, expressions, promtool, rules

UNIT_TESTS = Path(__file__).parent / "alerts_test.yml"


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A copy, with the key that prometheus-with-key.yml names."""
    copy = tmp_path / "monitoring"
    shutil.copytree(KIT, copy)
    (copy / "strata.key").write_text("key\n", encoding="utf-8")
    return copy


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-with-key.yml"])
def test_the_configs_are_valid(kit: Path, name: str) -> None:
    """With the rules and the key file that they name."""
    done = promtool("check", "config", kit / name)
    assert done.returncode == 0, done.stderr.decode()
    assert f"{len(RULES)} rule files found" in done.stdout.decode()


def test_the_config_without_its_key_is_not(tmp_path: Path) -> None:
    shutil.copytree(KIT, tmp_path / "kit", ignore=shutil.ignore_patterns("*.key"))
    done = promtool("check", "config", tmp_path / "kit" / "prometheus-with-key.yml")
    assert done.returncode != 0 and b"strata.key" in done.stderr


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_the_rules_are_valid(path: Path) -> None:
    """As many as our own scanner finds, so that the tests of names miss none."""
    done = promtool("check", "rules", path)
    assert done.returncode == 0, done.stderr.decode()
    assert f"{len(rules(path))} rules found" in done.stdout.decode()


def test_alerts_fire_when_they_should_and_only_then() -> None:
    done = promtool("test", "rules", UNIT_TESTS)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_every_alert_has_a_test_of_both_kinds() -> None:
    text = UNIT_TESTS.read_text(encoding="utf-8")
    quiet = set(re.findall(r"\{alertname: (\w+), eval_time: \w+, exp_alerts: \[\]\}", text))
    firing = set(re.findall(r"alertname: (\w+)\n +eval_time: \w+\n +exp_alerts:\n +- exp_labels", text))
    assert quiet == firing == set(rules(RULES[1]))


def test_the_healthy_server_of_the_tests_has_what_every_alert_reads() -> None:
    """An alert whose series were missing there would be quiet for the wrong reason."""
    text = UNIT_TESTS.read_text(encoding="utf-8")
    healthy = text[text.index("- name: healthy"):text.index("- name: idle")]
    given = set(re.findall(r"series: '([\w:]+)", healthy))
    recorded = rules(RULES[0])
    for query in rules(RULES[1]).values():
        for name in re.findall(r"[a-z][\w:]*(?=\{)", query):
            needed = re.findall(r"[a-z][\w:]*(?=\{)", recorded[name]) if name in recorded else [name]
            assert set(needed) <= given, name


def test_the_servers_output_is_valid() -> None:
    """The one complaint is about the colon of vLLM's names, which are kept because people's dashboards have them."""
    done = promtool("check", "metrics", stdin=exposition())
    complaints = [line for line in done.stderr.decode().splitlines() if line]
    assert all(re.fullmatch(r"vllm:\w+ metric names should not contain ':'", line) for line in complaints), complaints
    assert done.returncode in (0, 3)


def test_the_check_of_the_output_bites() -> None:
    assert promtool("check", "metrics", stdin=exposition().replace(b" 1.0\n", b" 1,0\n", 1)).returncode == 1


def test_every_expression_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    """promtool has no command for a bare expression, so each becomes a recording rule (JSON is YAML)."""
    recordings = [{"record": f"check:{number}", "expr": query} for number, (_, query) in enumerate(expressions())]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": recordings}]}), encoding="utf-8")
    done = promtool("check", "rules", path)
    assert done.returncode == 0, done.stderr.decode()
