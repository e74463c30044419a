"""The file of traces: one JSON line for each request that had a slot, with ids, times and token counts and not a token of text.

``tools/replay.py`` sends such a file through the slot machine under other rules.
Rule: a disk that is full costs the traces, never an answer.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from strata.errors import StartError
from strata.slots.events import Trace

log = logging.getLogger(__name__)


class TraceFile:
    """Appends to ``path``, a line at a time. Raises ``StartError`` where it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: TextIO | None = open(path, "a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise StartError(f"slot_trace: {path}: {error.strerror}; name a file that can be written") from None

    def write(self, trace: Trace) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(asdict(trace)) + "\n")
        except OSError as error:
            log.error("no more traces are written to %s: %s", self.path, error.strerror)
            self._file = None

    def close(self) -> None:
        """Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
