"""How much of a model's experts may be decoded at once on the CPU. Pure: the free memory is an argument.

All of them where that leaves a quarter of the memory beside the other weights for keys and values, else three quarters; or what
``expert_cache_mib`` says. Each stage gets its blocks' share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from strata.config import Settings
from strata.engine.architecture import ModelConfig
from strata.errors import SettingError

SHARE = 0.75
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ExpertRoom:
    """Bytes of float32: of all experts, and of those that may be decoded at once."""

    every: int
    held: int

    @property
    def limit(self) -> int | None:
        """As NumpyOps wants it."""
        return None if self.held >= self.every else self.held

    def share(self, every: int) -> ExpertRoom:
        """Of a part whose experts take so many bytes."""
        return ExpertRoom(every, self.held * every // self.every if every else 0)


def expert_bytes(config: ModelConfig, blocks: Iterable[int]) -> int:
    """Of all experts of these blocks as float32; the one that all rows share is a matrix like any other and does not count."""
    routed = sum(config.routed(block) for block in blocks)
    return 4 * routed * 3 * config.experts.count * config.experts.width * config.width if config.experts else 0


def expert_room(settings: Settings, config: ModelConfig, blocks: Iterable[int], free: int | None) -> ExpertRoom:
    """``blocks``: all that are served; ``free``: bytes beside all other weights, None if unknown. Raises SettingError."""
    every = expert_bytes(config, blocks)
    if not every or config.experts is None:
        return ExpertRoom(0, 0)
    held = every if free is None else min(every, int(free * SHARE))
    if settings.expert_cache_mib is not None:
        held = min(every, settings.expert_cache_mib * MIB)
    one_row = 4 * 3 * config.experts.used * config.experts.width * config.width
    if held < one_row or (free is not None and held > free):
        room = "" if free is None else f", and {max(0, free) // MIB} MiB are free beside the other weights"
        raise SettingError(
            f"expert_cache_mib: {max(0, held) // MIB} MiB for decoded experts; those of one token in one layer need {one_row // MIB + 1}, "
            f"all of them {every // MIB + 1}{room}"
        )
    return ExpertRoom(every, held)
