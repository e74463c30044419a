"""flake8 over everything, mypy over the package: part of the suite, so that neither can be forgotten."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.house.source import ROOT


def run(tool: str, *arguments: str) -> None:
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed: tools/test.py installs it")
    done = subprocess.run([sys.executable, "-m", tool, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_flake8_is_clean() -> None:
    run("flake8", "strata", "tools", "tests")


def test_mypy_is_clean() -> None:
    """Strict for messages, errors, config, slots, text and weights; setup.cfg says what is looser elsewhere."""
    run("mypy")
