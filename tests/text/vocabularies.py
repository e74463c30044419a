"""Vocabularies for the tests of text: SmolLM2's own, and tiny hand-made ones whose tokens can be worked out on paper."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

from strata.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@functools.cache
def smollm2_metadata() -> dict[str, Any]:
    return json.loads(gzip.decompress((DATA / "smollm2-vocabulary.json.gz").read_bytes()))


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(smollm2_metadata())


def byte_symbols() -> list[str]:
    """GPT-2's way to write each byte as one printable character, from its definition: byte 0x20 is the 33rd to be moved."""
    printable = set(range(33, 127)) | set(range(161, 173)) | set(range(174, 256))
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def bpe_metadata(merges: list[str], special: dict[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """Byte-level BPE: ids 0..255 are the bytes, then one token per merge, then ``special`` (name -> type)."""
    tokens = byte_symbols() + [merge.replace(" ", "") for merge in merges] + list(special or {})
    types = [NORMAL] * (256 + len(merges)) + list((special or {}).values())
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": merges, **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def spm_metadata(pieces: dict[str, float], special: dict[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """Sentencepiece: <unk> <s> </s>, the 256 byte tokens (3..258), ``special``, then ``pieces`` with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(special or {}), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *(special or {}).values(), *[NORMAL] * len(pieces)]
    scores = [0.0] * (259 + len(special or {})) + list(pieces.values())
    metadata = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(token) for token in ids]
