"""Every row of the settings table through every origin: it is read, named in ``origins``, and the stronger one wins."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from strata.config import TABLE, Loaded, load, printed
from strata.config.kinds import Choice, FilePath, Integer, Integers, Kind, Maybe, Names, Number, Switch
from strata.config.table import Row
from strata.errors import SettingError

ROWS = [row for row in TABLE if row.name != "config"]


def origins_of(row: Row) -> list[str]:
    """Weakest first. A secret has no flag, as others could read it."""
    return ["file", "env block", "environment"] if row.secret else ["file", "args", "env block", "environment", "flag"]


def samples(kind: Kind[Any]) -> list[str]:
    """Texts of legal values. Rows whose only value is the default (one choice) have one."""
    if isinstance(kind, Maybe):
        return samples(kind.kind)
    if isinstance(kind, Integer):
        return [str(kind.low + step) for step in (1, 2, 3, 4)]
    if isinstance(kind, Integers):
        return ["3,4", "5", "6,7", "8"]
    if isinstance(kind, Number):
        return [str(round(kind.low + (kind.high - kind.low) * step / 7, 3)) for step in (1, 2, 3, 4)]
    if isinstance(kind, Switch):
        return ["on", "off", "on", "off"]
    if isinstance(kind, Choice):
        return [kind.words[step % len(kind.words)] for step in (1, 2, 3, 4)]
    if isinstance(kind, FilePath):
        return ["one.x", "two.x", "three.x", "four.x"]
    return ["alpha,beta", "gamma", "delta,beta", "eta"] if isinstance(kind, Names) else ["alpha", "beta", "gamma", "delta"]


def different(row: Row, count: int) -> list[str]:
    """``count`` texts, each other than the one before and the first other than the default, as far as the kind has them."""
    texts = [text for text in samples(row.kind) if row.kind.parse(text) != row.default]
    texts += [text for text in samples(row.kind) if text not in texts]
    return [texts[number % len(texts)] for number in range(count)]


def typed(row: Row, text: str) -> object:
    """``text`` as JSON would say it."""
    kind = row.kind.kind if isinstance(row.kind, Maybe) else row.kind
    value = kind.parse(text)
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


class Origins:
    """Values for one row in some origins, loaded together."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.json"
        self.content: dict[str, Any] = {}
        self.environ: dict[str, str] = {}
        self.argv: list[str] = []

    def give(self, row: Row, origin: str, text: str) -> None:
        if origin == "file":
            (self.content.setdefault(row.section, {}) if row.section else self.content)[row.name] = typed(row, text)
        elif origin == "args":
            self.content["args"] = [f"{row.flag}={text}"]
        elif origin == "env block":
            self.content["env"] = {row.env: text}
        elif origin == "environment":
            self.environ[row.env] = text
        else:
            self.argv += [row.flag, text]

    def load(self) -> Loaded:
        self.path.write_text(json.dumps(self.content), encoding="utf-8")
        return load([*self.argv, "--config", str(self.path), "--print-config"], self.environ)


def value_of(row: Row, text: str, origin: str, folder: Path) -> object:
    value = row.kind.parse(text)
    in_file = origin in ("file", "args", "env block")
    return folder / value if isinstance(value, Path) and in_file else value


def label(part: Row | str) -> str:
    return part if isinstance(part, str) else part.name


@pytest.mark.parametrize(("row", "origin"), [(row, origin) for row in ROWS for origin in origins_of(row)], ids=label)
def test_every_row_is_read_from_every_origin(row: Row, origin: str, tmp_path: Path) -> None:
    [text] = different(row, 1)
    origins = Origins(tmp_path)
    origins.give(row, origin, text)
    loaded = origins.load()
    assert getattr(loaded.settings, row.name) == value_of(row, text, origin, tmp_path)
    assert loaded.origins[row.name] != "default"
    assert {name for name, where in loaded.origins.items() if where != "default"} == {row.name, "config"}
    assert loaded.origins[row.name] in printed(loaded)


PAIRS = [
    (row, weaker, stronger)
    for row in ROWS
    for weaker, stronger in combinations(origins_of(row), 2)
    if (weaker, stronger) != ("file", "args")  # one origin: they must agree
]


@pytest.mark.parametrize(("row", "weaker", "stronger"), PAIRS, ids=label)
def test_the_stronger_origin_wins(row: Row, weaker: str, stronger: str, tmp_path: Path) -> None:
    one, other = different(row, 2)
    origins = Origins(tmp_path)
    origins.give(row, weaker, one)
    origins.give(row, stronger, other)
    loaded = origins.load()
    assert getattr(loaded.settings, row.name) == value_of(row, other, stronger, tmp_path)
    alone = Origins(tmp_path)
    alone.give(row, stronger, other)
    assert loaded.origins[row.name] == alone.load().origins[row.name]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_an_empty_variable_is_not_set(row: Row, tmp_path: Path) -> None:
    [text] = different(row, 1)
    origins = Origins(tmp_path)
    origins.give(row, "file", text)
    origins.environ[row.env] = ""
    origins.content["env"] = {row.env: ""}
    assert getattr(origins.load().settings, row.name) == value_of(row, text, "file", tmp_path)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_is_shown_can_be_read_again(row: Row) -> None:
    for text in [*samples(row.kind), row.kind.show(row.default)]:
        value = row.kind.parse(text)
        assert row.kind.parse(row.kind.show(value)) == value
        assert row.kind.accept(value) == value


def test_config_itself_comes_from_flag_or_environment(tmp_path: Path) -> None:
    weak, strong = tmp_path / "weak.json", tmp_path / "strong.json"
    weak.write_text('{"batch": 2}', encoding="utf-8")
    strong.write_text('{"batch": 3}', encoding="utf-8")
    assert load(["--print-config"], {"STRATA_CONFIG": str(weak)}).settings.batch == 2
    assert load(["--print-config", f"--config={strong}"], {"STRATA_CONFIG": str(weak)}).settings.batch == 3
    assert load(["--print-config", "--config", "none"], {"STRATA_CONFIG": str(weak)}).settings.batch == 8


SYSTEM = [(row, variable, below) for row in ROWS for variable, below in row.system]


@pytest.mark.parametrize(("row", "variable", "below"), SYSTEM, ids=label)
def test_a_variable_of_the_system_is_another_default(row: Row, variable: str, below: str, tmp_path: Path) -> None:
    origins = Origins(tmp_path)
    origins.environ[variable] = "given"
    loaded = origins.load()
    assert getattr(loaded.settings, row.name) == row.kind.parse(str(Path("given", below)) if below else "given")
    assert loaded.origins[row.name] == f"{variable} in the environment" and variable in row.meaning
    for origin in origins_of(row):
        stronger = Origins(tmp_path)
        stronger.environ[variable] = "given"
        stronger.give(row, origin, "other")
        assert getattr(stronger.load().settings, row.name) == value_of(row, "other", origin, tmp_path)
    origins.environ[variable] = ""
    assert origins.load().origins[row.name] == "default"


def test_the_first_variable_that_says_something_counts() -> None:
    environ = {"CUDA_HOME": "second", "CUDA_PATH": "first", "LOCALAPPDATA": "there"}
    settings = load(["--print-config"], environ).settings
    assert (settings.cuda_toolkit, settings.kernel_cache) == (Path("first"), Path("there", "strata", "kernels"))


def test_a_variable_of_the_system_that_cannot_be_is_named() -> None:
    with pytest.raises(SettingError, match="CXX in the environment: .* must be a command"):
        load(["--print-config"], {"CXX": "\x07"})


ALIASES = [(row, alias) for row in ROWS for alias in row.aliases]


@pytest.mark.parametrize(("row", "alias"), ALIASES, ids=label)
def test_an_alias_is_the_same_setting_in_every_origin(row: Row, alias: str, tmp_path: Path) -> None:
    also = replace(row, name=alias, aliases=())
    for origin in origins_of(row):
        [text] = different(row, 1)
        origins = Origins(tmp_path)
        origins.give(also, origin, text)
        loaded = origins.load()
        assert getattr(loaded.settings, row.name) == value_of(row, text, origin, tmp_path)
        assert alias.replace("_", "-") in loaded.origins[row.name].lower().replace("_", "-")
