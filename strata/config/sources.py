"""The command line and the environment, each read into ``{row name: Given}``; the config file is in file.py.

Everything unknown is an error that names the nearest known name, wherever it was written: a switch that is accepted and
does nothing is the worst kind. Nothing here decides which origin wins (load.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.config.kinds import Switch
from strata.config.peers import OURS
from strata.config.settings import TABLE
from strata.config.table import Row, env_of, flag_of
from strata.errors import SettingError

MODES = {
    "help": "Show this text and exit.",
    "version": "Show the version and exit.",
    "print_config": "Show every setting with its value and where it came from, and exit.",
    "check": "Open the model, show the memory plan, and exit.",
}
# Names that belong to the test suite, not to the server.
FOREIGN_ENV = ("STRATA_TEST_",)


@dataclass(frozen=True)
class Given:
    """A value that somebody gave, and where: ``--batch``, ``STRATA_BATCH in the environment``, ``batch in FILE``."""

    value: Any
    origin: str


Givens = dict[str, Given]


def put(given: Givens, row: Row, value: Any, origin: str) -> None:
    """Note a value. The same setting twice in one origin, under two names, must say the same."""
    before = given.get(row.name)
    if before is not None and before.value != value:
        raise SettingError(f"{origin}: contradicts {before.origin}; keep one of them")
    given.setdefault(row.name, Given(value, origin))


def shown(word: str) -> str:
    """A word as somebody wrote it, fit for one line of a terminal."""
    return word if word.isprintable() else repr(word)


def refused(row: Row, origin: str, value: object) -> SettingError:
    """The error for a value that a row does not take: key, value, origin and range."""
    text = "***" if row.secret else repr(value)
    return SettingError(f"{origin}: {text} is not allowed, must be {row.range}")


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """What to try in place of an unknown word: what a peer's name is called here, else the nearest spelling."""
    names = list(known)
    ours = OURS.get(_bare(word))
    near = [name for name in names if _bare(name) == ours] or difflib.get_close_matches(word, names, n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def _bare(name: str) -> str:
    """The setting that a flag, a variable or a key names."""
    return name.lstrip("-").removeprefix("STRATA_").replace("-", "_").lower()


def read_command_line(words: Sequence[str], where: str = "") -> tuple[Givens, list[str]]:
    """``--name value``, ``--name=value`` and bare switches. The last of a repeated flag counts. Also returns the modes asked for."""
    rows = {flag_of(name): row for row in TABLE if row.flag for name in row.names}
    modes = {flag_of(name): name for name in MODES} | {"-h": "help"}
    given: Givens = {}
    asked: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in modes:
            asked.append(modes[word])
            continue
        flag, has_value, text = word.partition("=")
        if flag not in rows:
            raise SettingError(f"{shown(word)}{where}: {_why_unknown(flag, [*rows, *modes])}")
        row = rows[flag]
        if not has_value:
            text = _value_of_flag(row, flag + where, rest)
        try:
            given[row.name] = Given(row.kind.parse(text), flag + where)
        except ValueError:
            raise refused(row, flag + where, text) from None
    return given, asked


def _value_of_flag(row: Row, flag: str, rest: list[str]) -> str:
    """Take the flag's value off ``rest``; a switch may stand alone."""
    if isinstance(row.kind, Switch):
        try:
            row.kind.parse(rest[0] if rest else "")
        except ValueError:
            return "on"
    elif not rest or rest[0].startswith("--"):
        raise SettingError(f"{flag}: needs a value, {row.range}")
    return rest.pop(0)


def _why_unknown(flag: str, known: Iterable[str]) -> str:
    if not flag.startswith("-"):
        return "not expected here; a setting is --name value, see --help"
    for row in TABLE:
        if row.secret and flag == flag_of(row.name):
            return f"other users can read command lines; set {row.env}, or use {flag}-file FILE"
    return f"unknown; {nearest(flag, known, 'see --help')}"


def read_environment(variables: Mapping[str, str], where: str = "the environment") -> Givens:
    """Every ``STRATA_*`` variable; an empty one counts as not set."""
    rows = {env_of(name): row for row in TABLE for name in row.names}
    given: Givens = {}
    for variable in sorted(name for name in variables if name.startswith("STRATA_")):
        text, origin = variables[variable], f"{shown(variable)} in {where}"
        if variable.startswith(FOREIGN_ENV) or not text:
            continue
        if variable not in rows:
            raise SettingError(f"{origin}: unknown; {nearest(variable, rows, 'unset it, or see --help')}")
        row = rows[variable]
        try:
            put(given, row, row.kind.parse(text), origin)
        except ValueError:
            raise refused(row, origin, text) from None
    return given


def read_system(variables: Mapping[str, str]) -> Givens:
    """What the system's own variables (``CXX``) say for the rows that name some: other defaults, weaker than what is meant for us."""
    given: Givens = {}
    for row in TABLE:
        for variable, below in row.system:
            text, origin = variables.get(variable, ""), f"{variable} in the environment"
            if not text or row.name in given:
                continue
            try:
                given[row.name] = Given(row.kind.parse(str(Path(text, below)) if below else text), origin)
            except ValueError:
                raise refused(row, origin, text) from None
    return given
