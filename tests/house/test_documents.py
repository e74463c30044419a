"""What the documents and examples say is true of the settings table: names, flags, commands, links."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from strata.config import TABLE, load, markdown
from strata.config.sources import FOREIGN_ENV, MODES, read_command_line
from strata.config.table import env_of, flag_of
from tests.house.source import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/**/*.md")])
CONFIGS = sorted(ROOT.glob("configs/strata-*.json"))
TOOL_FLAGS = {"--wheels"}  # tools/serve.py's own
START = re.compile(r"(?:-m strata\.server|tools/serve\.py)(?P<rest>[^\n`]*)")

by_name = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def commands(text: str) -> list[list[str]]:
    """The arguments of every start command in a document; continued lines joined, what follows a pipe or comment cut off."""
    found = []
    for match in START.finditer(text.replace("\\\n", " ")):
        rest = re.split(r"\s[|&#>;]|[\[)]|\.\.\.", match["rest"])[0]
        found.append([word for word in shlex.split(rest.replace("'", ""))])
    return found


def test_config_md_is_made_from_the_table() -> None:
    made = (ROOT / "docs" / "CONFIG.md").read_text(encoding="utf-8")
    assert made == markdown(), "run: python -m strata.config > docs/CONFIG.md"


def test_there_are_examples() -> None:
    assert CONFIGS and DOCUMENTS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_example_configs_load(path: Path) -> None:
    loaded = load(["--config", str(path)], {})
    assert loaded.settings.model is not None


@by_name
def test_start_commands_use_real_flags(document: Path) -> None:
    for words in commands(document.read_text(encoding="utf-8")):
        while words and words[0] in TOOL_FLAGS:
            words = words[2:]
        read_command_line(words)


@by_name
def test_environment_names_exist(document: Path) -> None:
    known = {env_of(name) for row in TABLE for name in row.names}
    named = set(re.findall(r"\bSTRATA_[A-Z0-9_]*[A-Z0-9]\b", document.read_text(encoding="utf-8")))
    assert {name for name in named if not name.startswith(FOREIGN_ENV)} <= known


@by_name
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8")):
        assert "://" in target or target.startswith("mailto:") or (document.parent / target).exists(), target


def test_the_command_rule_reads_what_people_write() -> None:
    text = "```\nSTRATA_PORT=1 python3 -m strata.server --batch 4 \\\n  --kv int8 | tee log\n```\nuse `tools/serve.py --port 9` or `x`"
    assert commands(text) == [["--batch", "4", "--kv", "int8"], ["--port", "9"]]


def test_flags_and_modes_do_not_collide() -> None:
    flags = [flag_of(name) for row in TABLE for name in row.names]
    names = [*flags, *(flag_of(mode) for mode in MODES), *TOOL_FLAGS]
    assert len(set(names)) == len(names)
