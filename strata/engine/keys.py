"""The metadata of a model, read by key with the type checked."""

from __future__ import annotations

from collections.abc import Mapping

from strata.errors import ModelError
from strata.weights.gguf import GGUFFile


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
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value) or value < 1:
            raise ModelError(f"{self.file.path}: {self.prefix}.{key} is {value}, expected a whole number from 1")
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
