"""The metadata of a model, read by key with the type checked."""

from __future__ import annotations

import math
from collections.abc import Mapping

from strata.errors import ModelError
from strata.weights.gguf import GGUFFile

MOST = 2**31 - 1
"""Of any count: what is larger is damaged, and lists as long as it says would fill the memory."""


class Keys:
    """Metadata of one model, read by key with the type checked. Raises ModelError that names file and key."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file, self.prefix = file, prefix
        self.metadata: Mapping[str, object] = file.metadata

    def number(self, key: str, default: float | None = None) -> float:
        name = f"{self.prefix}.{key}"
        value = self.metadata.get(name, default)
        if value is None:
            raise ModelError(f"{self.file.path}: has no {name}; convert the model again")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{self.file.path}: {name} is not one number, which is not served")
        if not math.isfinite(value):
            raise ModelError(f"{self.file.path}: {name} is {value}, expected a finite number; convert the model again")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise ModelError(f"{self.file.path}: {self.prefix}.{key} is {value}, expected a number above 0; convert the model again")
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.number(key, default)
        if not least <= value <= MOST or value != int(value):
            raise ModelError(f"{self.file.path}: {self.prefix}.{key} is {value:.10g}, expected a whole number from {least} to {MOST}")
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.file.path}: {self.prefix}.{key} is neither true nor false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if not isinstance(value, str):
            raise ModelError(f"{self.file.path}: {self.prefix}.{key} is not a text")
        return value
