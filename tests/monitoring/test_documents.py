"""docs/METRICS.md and the dashboard are what their tools print, and the page leaves no metric out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.monitoring.kit import DASHBOARD, KIT, ROOT, RULES, rules, samples

PAGE = ROOT / "docs" / "METRICS.md"


@pytest.mark.parametrize(("tool", "path"), [("make_metrics_doc.py", PAGE), ("make_dashboard.py", DASHBOARD)])
def test_a_made_file_is_what_its_tool_prints(tool: str, path: Path) -> None:
    made = subprocess.run([sys.executable, str(ROOT / "tools" / tool)], capture_output=True, check=True, timeout=60).stdout
    assert made.decode() == path.read_text(encoding="utf-8"), f"run: python tools/{tool} > {path.relative_to(ROOT)}"


def test_the_page_names_every_series_of_a_real_server() -> None:
    named = set(re.findall(r"`((?:vllm:|strata_)\w+)`", PAGE.read_text(encoding="utf-8")))
    ours = {name for name in samples() if not name.startswith("process_")}
    families = {name if name in named else re.sub(r"_(?:bucket|sum|count)$", "", name) for name in ours}
    assert families == named


def test_the_readme_names_every_alert_and_no_other() -> None:
    text = (KIT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\bStrata[A-Z]\w+", text)) == set(rules(RULES[1]))
