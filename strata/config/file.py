"""The config file: one JSON object. Its keys, its ``args`` (flags, folded in) and its ``env`` block.

Strict where a slip would change nothing or the wrong thing: unknown keys, keys written twice, a setting that ``args`` and a
key give differently. Mild where nobody can be misled: a byte order mark, null for "not set". Relative paths count from the
file's folder, so that a config means the same from wherever the server is started.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strata.config.settings import TABLE
from strata.config.sources import Given, Givens, nearest, put, read_command_line, read_environment, refused, shown
from strata.config.table import Row, flag_of
from strata.errors import SettingError

_ROWS = {row.name: row for row in TABLE}


def read_file(path: Path) -> tuple[Givens, Givens]:
    """The file's own settings, and those of its ``env`` block (weaker and stronger, see load.py)."""
    entries = _entries(path)
    given: Givens = {}
    args = entries.pop("args", None)
    block = _env_block(entries.pop("env", None), path)
    for section in sorted({row.section for row in TABLE if row.section}):
        _read_keys(given, _object(entries.pop(section, None), f"{section} in {path}"), section, path)
    _read_keys(given, entries, "", path)
    for name, each in _args(args, path).items():
        put(given, _ROWS[name], each.value, each.origin)
    return _in_folder(given, path), _in_folder(block, path)


def _entries(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        return _object(json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant), f"{path}")
    except OSError as error:
        raise SettingError(f"{path}: cannot read the config file: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{path}: not valid JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a key stand twice and most readers keep the last in silence."""
    for index, (key, _) in enumerate(pairs):
        if any(key == later for later, _ in pairs[index + 1:]):
            raise ValueError(f"the key {key!r} stands there twice")
    return dict(pairs)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def _object(value: Any, origin: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SettingError(f"{origin}: must be an object, {{...}}")
    return value


def _read_keys(given: Givens, entries: dict[str, Any], section: str, path: Path) -> None:
    rows = _keys_of(section)
    for key, value in entries.items():
        origin = f"{section}.{shown(key)} in {path}" if section else f"{shown(key)} in {path}"
        if key not in rows:
            raise SettingError(f"{origin}: unknown; {_advice(key, rows)}")
        if value is None:
            continue
        try:
            put(given, rows[key], rows[key].kind.accept(value), origin)
        except ValueError:
            raise refused(rows[key], origin, value) from None


def _keys_of(section: str) -> dict[str, Row]:
    return {name: row for row in TABLE if row.section == section and row.in_file for name in row.names}


def _advice(key: str, rows: dict[str, Row]) -> str:
    for row in TABLE:
        if key == row.name and row.section:
            return f"it belongs into the {row.section!r} object"
    known = [*rows, *(row.section for row in TABLE if row.section), "args", "env"]
    return nearest(key, known, "see docs/CONFIG.md")


def _args(words: Any, path: Path) -> Givens:
    where = f" (args in {path})"
    if words is None:
        return {}
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise SettingError(f"args in {path}: must be a list of strings, as on a command line")
    given, modes = read_command_line(words, where)
    for name in (*modes, *given):
        if name not in _ROWS or not _ROWS[name].in_file:
            raise SettingError(f"{flag_of(name)}{where}: only on the command line")
    return given


def _env_block(value: Any, path: Path) -> Givens:
    """The same names and texts as the process environment; JSON numbers and true/false stand for their text."""
    texts: dict[str, str] = {}
    for name, each in _object(value, f"env in {path}").items():
        if not name.startswith("STRATA_"):
            raise SettingError(f"{shown(name)} in the env block of {path}: only STRATA_* names; export others before the server starts")
        if not isinstance(each, (str, int, float, type(None))):
            raise SettingError(f"{shown(name)} in the env block of {path}: must be a string")
        texts[name] = each if isinstance(each, str) else "" if each is None else json.dumps(each)
    given = read_environment(texts, f"the env block of {path}")
    for name, entry in given.items():
        if not _ROWS[name].in_file:
            raise SettingError(f"{entry.origin}: only in the environment or on the command line")
    return given


def _in_folder(given: Givens, path: Path) -> Givens:
    return {
        name: Given(path.parent / each.value, each.origin) if isinstance(each.value, Path) else each for name, each in given.items()
    }
