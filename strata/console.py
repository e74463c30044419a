"""What a person at the terminal sees: log lines, and progress while a model loads.

On a terminal the progress is one bar that redraws itself; elsewhere (a file, a journal) it is a log line per quarter, so
that a log never fills with control characters.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))}


def escape(text: str) -> str:
    """``text`` with control characters made visible, so that no client can forge a log line or drive a terminal."""
    return text.translate(_ESCAPES)


class TextFormatter(logging.Formatter):
    """``12:30:05 INFO  message``, one line a record; a traceback follows where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{stamp} {record.levelname:<7} {escape(record.getMessage())}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (Unix seconds), ``level``, ``message``; of a record with ``fields`` these, and its ``event``
    in place of the text that says the same."""

    def format(self, record: logging.LogRecord) -> str:
        message = getattr(record, "event", None) or record.getMessage()
        entry = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": message}
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True)


def setup_logging(level: str, form: str, stream: TextIO = sys.stderr) -> None:
    """Send the log of ``strata`` to ``stream`` as ``text`` or ``json``. The root logger is left to a host program."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger = logging.getLogger("strata")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class Progress:
    """Reports ``done`` of ``total`` bytes under a label; call it as often as you like, from any one thread at a time."""

    def __init__(self, label: str, stream: TextIO = sys.stderr) -> None:
        self._label, self._stream = label, stream
        self._bar = stream.isatty()
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(1, total)
        step = percent if self._bar else percent // 25
        if step == self._shown:
            return
        self._shown = step
        if self._bar:
            filled = percent * 30 // 100
            end = "\n" if done >= total else ""
            self._stream.write(f"\r{self._label} [{'#' * filled}{'.' * (30 - filled)}] {percent:3d} %{end}")
            self._stream.flush()
        else:
            logging.getLogger("strata").info("%s: %d %% of %.0f MB", self._label, percent, total / 1e6)
