"""The settings table as text: ``--help``, ``--print-config`` and docs/CONFIG.md."""

from __future__ import annotations

import textwrap
from itertools import groupby

from strata.config.load import Loaded
from strata.config.settings import TABLE
from strata.config.sources import MODES
from strata.config.table import Row, flag_of

WIDTH = 100
_INDENT = " " * 8


def help_text() -> str:
    """``--help``: every flag in its group, with default, range and environment name."""
    lines = ["usage: python -m strata.server --model FILE.gguf [--name value ...]", ""]
    for name, meaning in MODES.items():
        lines.append(f"  {flag_of(name):<16} {meaning}")
    for group, rows in groupby(TABLE, key=lambda row: row.group):
        lines += ["", f"{group}:"]
        for row in rows:
            lines += _help_of(row)
    lines += ["", *textwrap.wrap(PRECEDENCE, WIDTH)]
    return "\n".join(lines)


PRECEDENCE = (
    "Every flag --some-name is also STRATA_SOME_NAME in the environment and some_name in the config file. Strongest first: command "
    "line, environment, the config's \"env\" block, the config file, the default. A switch alone means on."
)


def _help_of(row: Row) -> list[str]:
    start = f"  {row.flag} {row.kind.metavar}" if row.flag else f"  {row.env}=... (no flag)"
    facts = [f"default {row.show(row.default)}", row.range]
    return [start, *textwrap.wrap(f"{row.meaning} [{'; '.join(facts)}]", WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)]


def printed(loaded: Loaded) -> str:
    """``--print-config``: name, value and origin of every setting, aligned; secrets masked."""
    cells = [(row.key, row.show(getattr(loaded.settings, row.name)), loaded.origins[row.name]) for row in TABLE]
    name_width, value_width = (max(len(cell[column]) for cell in cells) for column in (0, 1))
    return "\n".join(f"{name:<{name_width}}  {value:<{value_width}}  {origin}" for name, value, origin in cells)


def markdown() -> str:
    """docs/CONFIG.md; ``python -m strata.config`` prints it."""
    parts = [_HEAD]
    for group, rows in groupby(TABLE, key=lambda row: row.group):
        parts.append(f"\n## {group}\n\n| setting | default | values | meaning |\n|---|---|---|---|\n")
        parts += [f"| {_names(row)} | `{row.show(row.default)}` | {row.range} | {row.meaning} |\n" for row in rows]
    return "".join(parts)


def _names(row: Row) -> str:
    flag = f"`{row.flag}`" if row.flag else "no flag"
    key = f"`{row.key}`" if row.in_file else "no key"
    also = f" (also {', '.join(f'`{name}`' for name in row.aliases)})" if row.aliases else ""
    return f"{flag}<br>`{row.env}`<br>{key}{also}".replace("|", "\\|")


_HEAD = """# Settings

<!-- Made from strata/config/settings.py by `python -m strata.config > docs/CONFIG.md`; do not edit. -->

Every setting has a flag, an environment name and a config key. Where more than one gives a value, the strongest wins:

1. the command line (`--batch 4` or `--batch=4`; a switch alone means on, `--deterministic off` means off);
2. the process environment (`STRATA_BATCH=4`; empty means not set);
3. the config file's `env` block (`"env": {"STRATA_BATCH": "4"}`, exactly like the exported variable);
4. the config file (`"batch": 4`);
5. the default, which for a few settings follows a variable of the system that their row names (`CXX`).

`--print-config` shows each value and where it came from, `--check` opens the model too and shows the memory plan. A key, flag
or `STRATA_*` name that is unknown, or a value out of its range, refuses to start and names the nearest name
(for llama.cpp's, vLLM's or SGLang's name of a setting, ours) or the range.

The config file (`--config FILE`) is one JSON object in UTF-8. Keys are the flags with underscores; those of the group
*Sampling defaults* stand in an object `sampling`. `args` may hold a list of flags, `null` means not set, and relative paths
count from the file's own folder. Examples: `configs/`.

In Kubernetes a service called `strata` makes the cluster set `STRATA_PORT` and more in every pod: give the service another
name or set `enableServiceLinks: false`.
"""
