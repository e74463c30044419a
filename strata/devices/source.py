"""Where the kernels' sources are and what identifies a compiled one, for every device and the lint alike.

``cuda_src/`` lies beside the package in a checkout and inside it in a wheel (setup.cfg maps it there); a missing folder is
reported with its full path. A compiled kernel's
cache key is a digest of every source file, the entry names, the compiler and its options: an edit to any header, a driver
or compiler update, or another option makes a new key, and nothing is ever invalidated in place.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from strata.errors import StartError

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTALLED = _PACKAGE / "cuda_src"
SOURCE_FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "cuda_src"


def source_folder() -> Path:
    """The folder of the .cu files. Raises StartError where it is missing."""
    if not (SOURCE_FOLDER / "include" / "strata.cuh").is_file():
        raise StartError(f"kernel sources not found in {SOURCE_FOLDER}: run from a complete checkout")
    return SOURCE_FOLDER


@lru_cache(maxsize=1)
def headers_digest() -> str:
    """Of every header that a kernel can include."""
    digest = hashlib.sha256()
    for path in sorted((source_folder() / "include").glob("*.cuh")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def cache_key(stem: str, parts: Iterable[str]) -> str:
    """32 hexadecimal digits that change with the source of ``stem``.cu, any header, or any of ``parts``."""
    digest = hashlib.sha256(headers_digest().encode())
    digest.update((source_folder() / f"{stem}.cu").read_bytes())
    for part in parts:
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:32]


def default_cache() -> Path:
    """The folder for compiled kernels where nobody named one: in the user's cache folder."""
    base = Path("AppData", "Local") if sys.platform == "win32" else Path(".cache")
    return Path.home() / base / "strata" / "kernels"


def write_atomically(path: Path, data: bytes) -> None:
    """Other processes see the whole file or none: two servers may start on one cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.replace(name, path)
