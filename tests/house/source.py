"""The project's own Python files, parsed once, for the tests of the house rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Source:
    """One file: ``path`` from the root with forward slashes, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Dotted name; a package's ``__init__`` is the package."""
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Every Python file below ``folders``, in order of path."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            found.append(Source(path.relative_to(ROOT).as_posix(), text, ast.parse(text, str(path))))
    return tuple(found)


def imports(source: Source) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, at any depth and under TYPE_CHECKING too. ``from a import b`` gives a and a.b."""
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                above = parts[: len(parts) - (node.level - 1)]
                base = ".".join([*above, base] if base else above)
            yield base, node.lineno
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno
