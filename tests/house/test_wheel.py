"""A wheel holds the whole package, the kernels' sources and the data files, and works from any folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.source import ROOT

LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def files(folder: str) -> set[str]:
    """Everything in a folder of the checkout but what Python and its tools left there."""
    found = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {path.as_posix() for path in found if not any(part.startswith((".", "__pycache__")) for part in path.parts)}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel, built as pip builds it, without a network."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed: tools/test.py installs it")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("strata", "cuda_src"):
        shutil.copytree(ROOT / name, source / name, ignore=LEFT_OUT)
    for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.cfg"), *ROOT.glob("*.md"), *ROOT.glob("LICENSE"), *ROOT.glob("MANIFEST.in")):
        shutil.copy(path, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("strata_server-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_everything_is_in_the_wheel(installed: Path) -> None:
    found = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    package = {path for path in found if path.startswith("strata/")}
    assert package == files("strata") | {f"strata/{path}" for path in files("cuda_src")}
    assert any(path.endswith("LICENSE") for path in found - package)


def run(installed: Path, folder: Path, *arguments: str) -> str:
    """What Python prints with the unpacked wheel on its path, started in ``folder``."""
    environ = {**{name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_strata_finds_its_kernels(installed: Path, tmp_path: Path) -> None:
    found = run(installed, tmp_path, "-c", "from strata.devices.source import source_folder; print(source_folder())")
    assert Path(found.strip()) == (installed / "strata" / "cuda_src").resolve()


def test_an_installed_server_starts_from_any_folder(installed: Path, tmp_path: Path) -> None:
    assert "--model FILE" in run(installed, tmp_path, "-m", "strata.server", "--help")
