"""Which origin wins, and what must hold before the server may start.

Strongest first: command line, process environment, the config's ``env`` block, the config file, the default. A few defaults can be
said by variables that are not Strata's (``CXX``); their rows name them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strata.config.file import read_file
from strata.config.settings import TABLE, Settings
from strata.config.sources import Givens, read_command_line, read_environment, read_system
from strata.errors import SettingError

Mode = Literal["serve", "help", "version", "print_config", "check"]
DEFAULT = "default"


@dataclass(frozen=True)
class Loaded:
    """The settings, where each came from (by name), and what the command line asks to do with them."""

    settings: Settings
    origins: Mapping[str, str]
    mode: Mode = "serve"


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Loaded:
    """Read every origin once. ``argv`` without the program's name. Raises ``SettingError``: one line, for the operator.

    ``--help`` and ``--version`` are answered whatever else is wrong with the settings.
    """
    for mode in ("help", "version"):
        if f"--{mode}" in argv or (mode == "help" and "-h" in argv):
            return Loaded(Settings(), {row.name: DEFAULT for row in TABLE}, mode)
    flags, asked = read_command_line(argv)
    environment = read_environment(environ)
    block: Givens = {}
    keys: Givens = {}
    named = flags.get("config") or environment.get("config")
    if named is not None and named.value is not None:
        keys, block = read_file(named.value)
    merged = {**read_system(environ), **keys, **block, **environment, **flags}
    values: dict[str, Any] = {name: given.value for name, given in merged.items()}
    origins = {row.name: merged[row.name].origin if row.name in merged else DEFAULT for row in TABLE}
    settings = Settings(**values)
    if "print_config" in asked:
        return Loaded(settings, origins, "print_config")
    check(settings)
    return Loaded(settings, origins, "check" if "check" in asked else "serve")


def check(settings: Settings) -> None:
    """What must be set, and fit together, before a server may start. Raises ``SettingError``."""
    if settings.model is None:
        raise SettingError("no model: name a GGUF file with --model FILE, STRATA_MODEL or \"model\" in the config")
    if settings.batch_groups is not None and settings.batch % settings.batch_groups:
        raise SettingError(f"batch_groups: {settings.batch_groups} groups do not divide the {settings.batch} slots of batch evenly")
