"""Where the kernels' sources are.

In a checkout they stand beside the package (``cuda_src/``); a wheel carries them inside it, as data of ``strata.cuda_src``.
"""

from __future__ import annotations

from pathlib import Path

from strata.errors import StartError

_PACKAGE = Path(__file__).resolve().parent.parent


def cuda_sources(package: Path = _PACKAGE) -> Path:
    """The folder with the ``.cu`` files and ``include/``. Raises ``StartError`` where an installation lost it."""
    for folder in (package / "cuda_src", package.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise StartError(f"{package / 'cuda_src'}: the kernels' sources are missing; install Strata again")
