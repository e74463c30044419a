"""Files, functions and constructors stay small enough to be read at once."""

from __future__ import annotations

import ast

import pytest

from tests.house.source import Source, sources

FILE_LINES = 300
FUNCTION_LINES = 40
CONSTRUCTOR_ARGUMENTS = 6


def offences(source: Source) -> list[str]:
    found = []
    lines = len(source.text.splitlines())
    if lines > FILE_LINES:
        found.append(f"{source.path}: {lines} lines, at most {FILE_LINES}")
    for node in ast.walk(source.tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES:
            found.append(f"{source.path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES}")
        arguments = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs) - 1
        if node.name == "__init__" and arguments > CONSTRUCTOR_ARGUMENTS:
            found.append(f"{source.path}:{node.lineno}: a constructor with {arguments} arguments, at most {CONSTRUCTOR_ARGUMENTS}")
    return found


@pytest.mark.parametrize("source", sources("strata", "tools", "tests"), ids=lambda source: source.path)
def test_sizes(source: Source) -> None:
    assert offences(source) == []


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n" * (FILE_LINES + 1),
        "def f():\n" + "    pass\n" * FUNCTION_LINES,
        "class A:\n    async def f(self):\n" + "        pass\n" * FUNCTION_LINES,
        "class A:\n    def __init__(self, a, b, c, d, e, f, g): pass",
        "class A:\n    def __init__(self, a, b, c, *, d, e, f, g): pass",
    ],
)
def test_the_limits_bite(text: str) -> None:
    assert len(offences(Source("x.py", text, ast.parse(text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n" * FILE_LINES,
        "def f():\n" + "    pass\n" * (FUNCTION_LINES - 1),
        "class A:\n    def __init__(self, a, b, c, d, e, f): pass",
    ],
)
def test_the_limits_themselves_pass(text: str) -> None:
    assert offences(Source("x.py", text, ast.parse(text))) == []
