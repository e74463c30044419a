"""Where a model's heads are: in its own file or in one of their own, found by their tensors and checked before anything is read.

A head's own file holds the tensors of its blocks alone, ``blk.N.nextn.*`` and the block's usual names, N counting on from the trunk's
layers; tensors that it lacks of ``shared_head_norm``, ``shared_head_head`` and ``embed_tokens`` are the trunk's. The tokens worth drafting,
most frequent first, are the metadata array ``strata.draft_vocab``. Metadata that promises a head proves nothing: tools strip heads
and leave the key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from strata.config import Settings
from strata.engine.architecture import ModelConfig
from strata.engine.keys import Keys
from strata.engine.tensor_names import block_names, check_shapes, draft_blocks
from strata.errors import ModelError
from strata.weights.cursor import quoted
from strata.weights.gguf import GGUFFile

CPU_SPEC = 16  # what is copied is worth every row of it; of what is not, no more is drafted than pays (docs/LOG.md)
DEVICE_SPEC = 4
CPU_VOCAB, DEVICE_VOCAB = 2048, 8192  # without room for what the texts say, as on devices, it takes more to accept as much (docs/LOG.md)
DRAFT_VOCAB = "strata.draft_vocab"
SAME = ("embedding_length", "attention.head_count", "attention.head_count_kv", "attention.key_length", "rope.freq_base",
        "attention.layer_norm_rms_epsilon", "rope.dimension_count", "expert_count", "expert_used_count", "expert_gating_func", "vocab_size")


@dataclass(frozen=True, slots=True)
class Heads:
    """``config.mtp_blocks`` are the blocks, in ``file``. ``vocabulary``: the tokens that they draft, int64, the most frequent first; None
    for all."""

    file: GGUFFile
    config: ModelConfig
    vocabulary: NDArray[np.int64] | None
    is_own_file: bool

    @property
    def ascending(self) -> NDArray[np.int64] | None:
        """``vocabulary`` as kernels search it."""
        return None if self.vocabulary is None else np.sort(self.vocabulary)

    @property
    def weight_bytes(self) -> int:
        """Of the blocks as float32, with a copy of the output matrix for a part of the vocabulary."""
        prefixes = tuple(f"blk.{block}." for block in self.config.mtp_blocks)
        blocks = sum(math.prod(tensor.shape) for name, tensor in self.file.tensors.items() if name.startswith(prefixes))
        return 4 * (blocks + (0 if self.vocabulary is None else len(self.vocabulary) * self.config.width))

    def close(self) -> None:
        """Let go of the heads' own file."""
        if self.is_own_file:
            self.file.close()


def num_heads(heads: Heads | None) -> int:
    return len(heads.config.mtp_blocks) if heads else 0


def spec_tokens(settings: Settings, config: ModelConfig) -> int:
    """Tokens of a slot that one pass may check: as set, or as many as may pay."""
    if settings.spec or settings.device == "cpu":
        return settings.spec or CPU_SPEC
    return DEVICE_SPEC if settings.mtp or config.mtp_blocks else 1


def draft_tokens(settings: Settings) -> int:
    """How many of the listed tokens a head drafts, 0 for all there are: as set, or as many as pay."""
    if settings.draft_vocab is not None:
        return settings.draft_vocab
    return CPU_VOCAB if settings.device == "cpu" else DEVICE_VOCAB


def find_heads(settings: Settings, file: GGUFFile, config: ModelConfig) -> Heads | None:
    """The heads that serve the model ``file``, None where drafts are off or it has none. Raises ModelError for a file of heads that do
    not fit the model; close the result after the engine."""
    if spec_tokens(settings, config) == 1:
        return None
    if settings.mtp is not None:
        heads_file = GGUFFile.open(settings.mtp)
        try:
            return Heads(heads_file, fitting(heads_file, file, config), draft_vocabulary(heads_file, config, draft_tokens(settings)), True)
        except BaseException:
            heads_file.close()
            raise
    if not config.mtp_blocks:
        return None
    return Heads(file, config, draft_vocabulary(file, config, draft_tokens(settings)), False)


def fitting(heads: GGUFFile, model: GGUFFile, config: ModelConfig) -> ModelConfig:
    """The model's configuration with the blocks of ``heads``, which can stand behind its trunk. Raises ModelError."""
    name = heads.metadata.get("general.architecture")
    if name != config.family.name:
        raise ModelError(
            f"{heads.path}: general.architecture is {str(name)[:40]!r}, and the model's is {config.family.name!r}; "
            f"give --mtp a head made for {model.path.name}"
        )
    blocks = draft_blocks(heads.tensors)
    if not blocks:
        raise ModelError(f"{heads.path}: has no tensor blk.N.nextn.eh_proj.weight, so it is no MTP head; give --mtp another file, or none")
    _check_keys(Keys(heads, str(name)), Keys(model, str(name)))
    if blocks != tuple(range(config.num_layers, config.num_layers + len(blocks))):
        raise ModelError(
            f"{heads.path}: tensor blk.{blocks[0]}.nextn.eh_proj.weight: its heads are blocks {', '.join(map(str, blocks))}; the model's "
            f"{config.num_layers} layers go to blk.{config.num_layers - 1}; give --mtp a head made for {model.path.name}"
        )
    fitted = replace(config, mtp_blocks=blocks)
    _check_names(heads, fitted)
    check_shapes(heads, fitted)
    return fitted


def _check_names(heads: GGUFFile, config: ModelConfig) -> None:
    """The blocks have all that they need and nothing that would be left out."""
    for block in config.mtp_blocks:
        required, optional = block_names(config, block)
        missing = [each for each in required if each not in heads.tensors]
        if missing:
            raise ModelError(f"{heads.path}: tensor {missing[0]} is missing ({len(missing)} in all); convert the head again")
        known = {*required, *optional}
        for each in heads.tensors:
            if each.startswith(f"blk.{block}.") and each not in known:
                raise ModelError(f"{heads.path}: tensor {quoted(each)} is none of a {config.family.name} head's; convert the head again")


def _check_keys(heads: Keys, model: Keys) -> None:
    """What both files say of the trunk is the same."""
    for key in SAME:
        if not all(f"{each.prefix}.{key}" in each.metadata for each in (heads, model)):
            continue
        mine, other = heads.number(key), model.number(key)
        if mine != other:
            raise ModelError(
                f"{heads.file.path}: {heads.prefix}.{key} is {mine}, and the model's is {other}; give --mtp a head made for "
                f"{model.file.path.name}"
            )


def draft_vocabulary(file: GGUFFile, config: ModelConfig, most: int) -> NDArray[np.int64] | None:
    """The ``most`` first tokens of the file's list; None for all tokens, as without a list or with ``most`` 0."""
    listed = file.metadata.get(DRAFT_VOCAB)
    if listed is None or most == 0:
        return None
    if not isinstance(listed, np.ndarray) or listed.dtype.kind not in "iu" or not len(listed):
        raise ModelError(f"{file.path}: {DRAFT_VOCAB} is no list of token ids; convert the head again")
    ids = np.unique(listed.astype(np.int64))
    if len(ids) != len(listed) or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise ModelError(f"{file.path}: {DRAFT_VOCAB} names a token twice, or one that is none of the model's {config.vocab_size}; "
                         "convert the head again")
    return listed[:most].astype(np.int64)
