"""A setting that is accepted and does nothing is the worst kind: every row is read outside the settings' own package."""

from __future__ import annotations

import ast

import pytest

from strata.config import TABLE
from strata.config.kinds import Choice
from tests.house.source import Source, sources

READ_BY_LOAD = {"config"}
NAMES = {row.name for row in TABLE}
# With one word to choose from there is nothing to decide.
NO_CHOICE = {row.name for row in TABLE if isinstance(row.kind, Choice) and len(row.kind.words) == 1}


def settings_read(source: Source) -> set[str]:
    """Attributes of whatever is called ``settings``: ``settings.batch``, ``self.settings.batch``, ``loaded.settings.batch``.

    In a file with ``getattr(settings, name)`` also every row's name that stands there as a string.
    """
    found = set()
    if "getattr(settings, " in source.text:
        strings = {node.value for node in ast.walk(source.tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        found = strings & NAMES
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name.lstrip("_") == "settings":
                found.add(node.attr)
    return found


READ = set[str]().union(*(settings_read(each) for each in sources("strata") if not each.path.startswith("strata/config/")))


@pytest.mark.parametrize("name", sorted(NAMES - READ_BY_LOAD - NO_CHOICE))
def test_somebody_reads_it(name: str) -> None:
    assert name in READ


def test_only_what_exists_is_read() -> None:
    assert READ <= NAMES


def test_reads_are_seen() -> None:
    text = "a = settings.batch\nb = self._settings.port\nc = x.y.settings.host\nd = other.kv\n"
    assert settings_read(Source("x.py", text, ast.parse(text))) == {"batch", "port", "host"}
    text = "for name in ('top_p', 'x'):\n    getattr(settings, name)\n"
    assert settings_read(Source("x.py", text, ast.parse(text))) == {"top_p"}
