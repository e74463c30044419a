"""When tools/_venv.py makes, adds or leaves alone, decided on files; pip and venv themselves are replaced."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tools.checkout import ROOT, SETUP


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("_venv")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "setup.cfg").write_text(SETUP, encoding="utf-8")
    return tmp_path


def recorded(tool: ModuleType, root: Path) -> Any:
    """A Venv that notes what it would do in ``.done`` and only makes files."""

    class Recorded(tool.Venv):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__(root)
            self.done: list[str] = []

        def _make(self, clear: bool) -> None:
            self.done.append("clear" if clear else "make")
            self.python.parent.mkdir(parents=True, exist_ok=True)
            self.python.write_text("pass import pip import sys", encoding="utf-8")

        def _answers(self, code: str) -> bool:
            return self.python.exists() and code.partition(";")[0] in self.python.read_text(encoding="utf-8")

        def pip(self, arguments: list[str], wheels: str | None) -> None:
            self.done += arguments

        def _link(self) -> None:
            self.done.append("link")

    return Recorded()


def steps(tool: ModuleType, root: Path, **arguments: Any) -> list[str]:
    venv = recorded(tool, root)
    venv.ensure(**arguments)
    done: list[str] = venv.done
    return done


FIRST = ["make", "install", "tinydep >= 1.0", "link"]


def test_the_first_start_makes_everything_and_the_second_nothing(tool: ModuleType, root: Path) -> None:
    assert steps(tool, root) == FIRST
    assert steps(tool, root) == []


def test_the_tests_add_to_what_is_there_and_serving_needs_no_more(tool: ModuleType, root: Path) -> None:
    steps(tool, root)
    assert steps(tool, root, extras=("test",)) == ["install", "tinydep >= 1.0", "tinytest >= 1.0", "link"]
    assert steps(tool, root) == steps(tool, root, extras=("test",)) == []


def test_a_new_requirement_is_installed(tool: ModuleType, root: Path) -> None:
    steps(tool, root)
    setup = root / "setup.cfg"
    setup.write_text(SETUP.replace("tinydep >= 1.0", "tinydep >= 1.0\n    other; sys_platform != 'x'"), encoding="utf-8")
    assert steps(tool, root) == ["install", "other; sys_platform != 'x'", "tinydep >= 1.0", "link"]


def test_another_python_starts_afresh(tool: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(tool, root)
    monkeypatch.setattr(tool.sys, "version_info", (3, 99, 0))
    assert steps(tool, root) == ["clear", *FIRST[1:]]


def test_a_moved_checkout_starts_afresh(tool: ModuleType, root: Path) -> None:
    steps(tool, root)
    moved = root.rename(root.with_name("moved"))
    assert steps(tool, moved) == ["clear", *FIRST[1:]]


def test_a_dead_environment_starts_afresh(tool: ModuleType, root: Path) -> None:
    steps(tool, root)
    recorded(tool, root).python.write_text("its interpreter was removed", encoding="utf-8")
    assert steps(tool, root) == ["clear", *FIRST[1:]]


def found(tool: ModuleType, root: Path, python: str) -> None:
    """An environment without our stamp, whose Python runs code that begins with one of these words."""
    venv = recorded(tool, root)
    venv.python.parent.mkdir(parents=True)
    venv.python.write_text(python, encoding="utf-8")


def test_somebody_elses_environment_is_added_to(tool: ModuleType, root: Path) -> None:
    found(tool, root, "pass import pip import sys")
    assert steps(tool, root) == FIRST[1:]


def test_an_interrupted_one_without_pip_is_completed(tool: ModuleType, root: Path) -> None:
    found(tool, root, "pass import sys")
    assert steps(tool, root) == FIRST


def test_somebody_elses_environment_of_another_python_is_left_alone(tool: ModuleType, root: Path) -> None:
    found(tool, root, "pass import pip")
    with pytest.raises(tool.Problem, match="somebody's environment of another Python"):
        steps(tool, root)


def test_a_broken_stamp_counts_as_none(tool: ModuleType, root: Path) -> None:
    steps(tool, root)
    recorded(tool, root).stamp.write_bytes(b"\xff\xfe")
    assert steps(tool, root) == FIRST[1:]


def test_an_old_python_is_told(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tool.require_python()
    monkeypatch.setattr(tool.sys, "version_info", (3, 9, 2))
    with pytest.raises(tool.Problem, match=r"Python 3\.9\.2 is too old"):
        tool.require_python()


@pytest.mark.parametrize(
    ("output", "wheels", "words"),
    [
        ("ERROR: Could not find a version\nERROR: No matching distribution found for h11>=0.16\n", None, "pip cannot find h11>=0.16"),
        ("ERROR: No matching distribution found for h11>=0.16\n", "w", "w holds no fitting wheel for h11>=0.16"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left\n\nWARNING: x", None, "No space left"),
        ("", None, "pip failed: no message"),
    ],
)
def test_a_failure_of_pip_becomes_one_line(tool: ModuleType, output: str, wheels: str | None, words: str) -> None:
    text = tool.why_pip_failed(output, wheels)
    assert words in text and "\n" not in text


def test_the_real_setup_cfg_is_read(tool: ModuleType) -> None:
    own = tool.requirements(ROOT, ())
    assert any(line.startswith("numpy") for line in own)
    assert any(line.startswith("pytest") for line in tool.requirements(ROOT, ("test",)) - own)


def test_the_tools_use_the_standard_library_alone(tool: ModuleType) -> None:
    """And what the checkout brings: they run before anything is installed."""
    from tests.house.source import imports, sources

    names = {"serve", "test", "_venv", "_model", "_gpu"}
    own = [each for each in sources("tools") if each.path in {f"tools/{name}.py" for name in names}]
    tops = {module.partition(".")[0] for each in own for module, _ in imports(each)}
    assert len(own) == len(names)
    assert tops <= set(sys.stdlib_module_names) | {"strata"} | names
