"""What a decode window costs each stage, to cut the layers by. Pure: how fast a device reads is an argument.

Cost model. A window reads every matrix once, whatever its rows, and of experts those that a row goes to, so a tensor takes its bytes in
the device's layout divided by the bytes a second that products in this layout were measured to read (device_rates.py; on the CPU and the
emulated device, where nothing is measured, bytes are seconds, divided by the stage's threads). The last stage has the output
matrix too and, where drafts are on, up to three passes through a block that drafts and through the part of the output matrix that
holds the tokens it may draft. Keys and values are left out: they cost every layer the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

from strata.config import Settings
from strata.engine.families import ModelConfig
from strata.engine.mtp_file import find_heads, num_heads, spec_tokens
from strata.weights.gguf import GGUFFile, Tensor
from strata.weights.layouts import ODD4, PACKED3, SUPER, padded
from strata.weights.recode import layouts_for

Seconds = Callable[[Tensor], float]
Rates = Mapping[str, float] | None
"""Layout -> bytes a second; None where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds (or any unit) of a window: of each layer, and what the last stage has beside its layers."""

    layers: tuple[float, ...]
    last: float


def share_read(tensor: Tensor, config: ModelConfig) -> float:
    """The part of a tensor that one row reads: of experts, those that it goes to."""
    return config.experts.used / config.experts.count if config.experts and len(tensor.shape) == 3 else 1.0


def float_seconds(config: ModelConfig, threads: int) -> Seconds:
    """On the CPU, which keeps weights as float32."""
    return lambda tensor: 4 * math.prod(tensor.shape) * share_read(tensor, config) / threads


def device_seconds(config: ModelConfig, rates: Rates) -> Seconds:
    """On a device, in the quickest of the layouts that hold a tensor."""

    def seconds(tensor: Tensor) -> float:
        if len(tensor.shape) < 2:
            return 0.0
        rows, width = math.prod(tensor.shape[:-1]), padded(tensor.shape[-1])
        times = [layout.bytes(rows, width) / (rates[layout.name] if rates else 1.0) for layout in layouts_for(tensor.type)]
        return share_read(tensor, config) * min(times)

    return seconds


def packed_is_faster(rates: Rates) -> bool:
    """Whether IQ3_S is multiplied quicker packed than as nibbles. Not where nothing was measured: nibbles need fewer instructions."""
    if not rates or PACKED3.name not in rates:
        return False
    return PACKED3.bytes(1, SUPER) / rates[PACKED3.name] < ODD4.bytes(1, SUPER) / rates[ODD4.name]


def costs(settings: Settings, file: GGUFFile, config: ModelConfig, seconds: Seconds) -> Costs:
    """Of a model whose tensors take ``seconds``. Raises ModelError for a file of heads that do not fit it."""
    layers = [0.0] * config.num_layers
    for name, tensor in file.tensors.items():
        block = int(name.split(".")[1]) if name.startswith("blk.") else len(layers)
        if block < len(layers):
            layers[block] += seconds(tensor)
    tensors = dict(file.tensors.items())
    output = seconds(tensors["token_embd.weight" if config.tied else "output.weight"])
    return Costs(tuple(layers), output + drafting(settings, file, config, seconds, output))


USUAL_STEPS = 3
"""Of a head in a window; more seldom pay."""


def drafting(settings: Settings, file: GGUFFile, config: ModelConfig, seconds: Seconds, output: float) -> float:
    """Of the drafts that follow a window. ``output``: of the whole output matrix."""
    heads = find_heads(settings, file, config)
    if heads is None:
        return 0.0
    with closing(heads):
        prefixes = tuple(f"blk.{block}." for block in heads.config.mtp_blocks)
        own = {name: tensor for name, tensor in heads.file.tensors.items() if name.startswith(prefixes)}
        outputs = [seconds(own.pop(name)) for name in list(own) if name.endswith(".nextn.shared_head_head.weight")]
        blocks = sum(seconds(tensor) for name, tensor in own.items() if not name.endswith(".nextn.embed_tokens.weight"))
        share = 1.0 if heads.vocabulary is None else len(heads.vocabulary) / config.vocab_size
        return min(spec_tokens(settings, config) - 1, USUAL_STEPS) * (blocks / num_heads(heads) + share * max([*outputs, output]))
