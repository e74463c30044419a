"""What must not stand in a committed file: paths of somebody's machine, unfinished business, a read of the environment."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.house.source import ROOT, Source, sources

HERE = Path(__file__).name
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|home|tmp|Users)/|[A-Z]:\\Users|\.\./shared\b")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
# The one place: everybody else is handed settings.
READS_ENVIRONMENT = "strata/server/__main__.py"


def committed() -> list[Path]:
    """Files that git tracks, or would; every file of the project's folders where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        folders = ("strata", "tests", "tools", "docs", "configs", "cuda_src")
        return [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in committed():
        data = path.read_bytes()
        if b"\0" in data or path.name == HERE:
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT).as_posix()}:{number}: {line.strip()[:100]}")
    return found


def test_no_path_of_a_machine() -> None:
    assert lines_with(MACHINE_PATH) == []


def test_nothing_unfinished() -> None:
    assert lines_with(UNFINISHED) == []


@pytest.mark.parametrize("line", ["open('/root/x')", "see ../shared/x", "cd /tmp/x", r"C:\Users\me", "file:///home/me"])
def test_the_path_rule_bites(line: str) -> None:
    assert MACHINE_PATH.search(line)


@pytest.mark.parametrize("line", ["https://example.org/homepage", "/v1/models", "shared/x", "GET /workers/1", "a/tmp/b"])
def test_the_path_rule_lets_others_pass(line: str) -> None:
    assert not MACHINE_PATH.search(line)


def reads_environment(source: Source) -> bool:
    names = {node.attr for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return bool(names & {"environ", "environb", "getenv", "putenv"})


@pytest.mark.parametrize("source", sources("strata"), ids=lambda source: source.path)
def test_only_the_settings_read_the_environment(source: Source) -> None:
    assert reads_environment(source) == (source.path == READS_ENVIRONMENT)


@pytest.mark.parametrize("text", ["import os\nos.environ['X']", "from os import getenv", "import os\nx = os.getenv('X')"])
def test_the_environment_rule_bites(text: str) -> None:
    assert reads_environment(Source("x.py", text, ast.parse(text)))
