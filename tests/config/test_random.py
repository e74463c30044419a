"""Whatever is written, the answer is settings or one line: never another exception."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.config import TABLE, load, printed
from strata.config.table import env_of, flag_of
from strata.errors import SettingError

NAMES = [row.name for row in TABLE if row.name != "config"]
WORDS = st.one_of(
    st.sampled_from([flag_of(name) for name in NAMES]),
    st.sampled_from(["on", "off", "auto", "none", "0", "1", "1e3", "-1", "inf", "", "=", "--", "-", "a,b", "\0", "\ud800", "٣"]),
    st.text(max_size=8),
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6
)
KEYS = st.sampled_from([*NAMES, "sampling", "env", "args", "parallel"]) | st.text(max_size=4)


def answer(argv: list[str], environ: dict[str, str]) -> None:
    try:
        text = printed(load([*argv, "--print-config"], environ))
    except SettingError as error:
        text = error.message
        assert text and text.isprintable(), "one line, and nothing that drives a terminal"
    assert "hush" not in text


@given(argv=st.lists(WORDS, max_size=6))
def test_any_command_line(argv: list[str]) -> None:
    answer(argv, {"STRATA_API_KEY": "hush"})


@given(environ=st.dictionaries(st.sampled_from([env_of(name) for name in NAMES]), WORDS, max_size=4))
def test_any_environment(environ: dict[str, str]) -> None:
    answer([], environ)


@given(content=st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_config(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    answer(["--config", str(path)], {"STRATA_API_KEY": "hush"})


@given(data=st.binary(max_size=40))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(data)
    answer(["--config", str(path)], {})
