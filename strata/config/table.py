"""What a row of the settings table says, beside its name and type.

A row is one field of ``Settings`` (settings.py): ``batch: int = row(Integer(1, 256), 8, SLOTS, "...")``. Flag, environment
name, config key, ``--help`` and docs/CONFIG.md all follow from it; no other file has to change.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

from strata.config.kinds import Kind

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One setting.

    ``unit`` of a number. ``section``: the config object that holds the key (``sampling``), "" for the top level. ``aliases``:
    other names for the same row, in every origin. ``secret``: masked wherever it is shown, and no flag, because other users
    of a machine can read command lines. ``in_file``: False where the config file cannot say it. ``system``: the system's own
    variables that stand in for the default, first found first, each with what is appended to its path ("": nothing).
    """

    kind: Kind[Any]
    default: Any
    group: str
    meaning: str
    unit: str = ""
    section: str = ""
    aliases: tuple[str, ...] = ()
    secret: bool = False
    in_file: bool = True
    system: tuple[tuple[str, str], ...] = ()
    name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def key(self) -> str:
        """The config key, with its section: ``sampling.top_p``."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def flag(self) -> str:
        return "" if self.secret else flag_of(self.name)

    @property
    def env(self) -> str:
        return env_of(self.name)

    @property
    def range(self) -> str:
        """Completes "must be": the range with its unit."""
        return f"{self.kind.range} ({self.unit})" if self.unit else self.kind.range

    def show(self, value: Any) -> str:
        """``value`` as text; a secret as stars."""
        shown = self.kind.show(value)
        return "***" if self.secret and value is not None else shown


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def env_of(name: str) -> str:
    return "STRATA_" + name.upper()


def row(kind: Kind[T], default: T, group: str, meaning: str, **more: Any) -> T:
    """A field of ``Settings``; ``more`` are further attributes of ``Row``. A secret stays out of ``repr``.

    Typed as its value, so that a type checker compares annotation, kind and default.
    """
    spec = Row(kind, default, group, meaning, **more)
    return field(default=default, repr=not spec.secret, metadata={"row": spec})


def rows_of(settings: type[Any]) -> tuple[Row, ...]:
    """The table: every field's row, in the order written."""
    return tuple(dataclasses.replace(each.metadata["row"], name=each.name) for each in dataclasses.fields(settings))
