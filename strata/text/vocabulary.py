"""The vocabulary of a model file: every ``tokenizer.ggml.*`` key read, checked and given a type, once.

Whatever is wrong with a file is said here, by key, and nothing later checks again. An id outside the vocabulary is an
error and not a warning: a model that cannot find its end-of-text token never stops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from strata.errors import ModelError
from strata.text.pretokenizers import PreTokenizer, pre_tokenizer

Metadata = Mapping[str, object]
Kind = Literal["bpe", "spm"]

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_KINDS: dict[str, Kind] = {"gpt2": "bpe", "llama": "spm"}
_PREFIX = "tokenizer.ggml."
# Names under which families keep the token that ends an answer. Some files type them wrongly or name only one of several.
_END_NAMES = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>", "<|return|>",
    "<|call|>", "<|calls|>", "<|flush|>", "<end_of_utterance>", "<turn|>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
# These can be ordinary words of a vocabulary (HTML's strike-through is one), so their type must say CONTROL as well.
_END_NAMES_IF_CONTROL = frozenset({"</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|tool_response>", "[e~["})


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``tokens``, ``types`` and ``scores`` are indexed by id. ``merges`` (BPE) best first, ``"left right"``.

    ``end_tokens``: eos, eot, eom and every token known by name to end an answer. ``add_space_prefix`` (SPM): a text is read
    as if it began with a space.
    """

    kind: Kind
    pre: PreTokenizer
    tokens: list[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    bos: int | None
    eos: int | None
    unknown: int | None
    end_tokens: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Checks and reads the tokenizer keys. Raises ``ModelError`` naming the key that is missing or wrong."""
    kind = _kind(metadata)
    tokens = _tokens(metadata)
    types = [int(n) for n in _numbers(metadata, "token_type", len(tokens), NORMAL)]
    spm = kind == "spm"
    ids = {key: _token_id(metadata, f"{key}_token_id", len(tokens)) for key in ("bos", "eos", "eot", "eom", "unknown")}
    # sentencepiece's own ids, which files of its first years leave out
    for key, default in (("unknown", 0), ("bos", 1), ("eos", 2)) if spm else ():
        if ids[key] is None and default < len(tokens):
            ids[key] = default
    ends = _end_tokens(tokens, types, ids)
    for token in ends:
        if tokens[token] in _END_NAMES:
            types[token] = CONTROL
    pre = PreTokenizer((), add_bos=True) if spm else pre_tokenizer(_text(metadata, "pre", "default"))
    add_bos = _flag(metadata, "add_bos_token", pre.add_bos and ids["bos"] is not None)
    add_eos = _flag(metadata, "add_eos_token", False)
    for wanted, key in ((add_bos, "bos"), (add_eos, "eos")):
        if wanted and ids[key] is None:
            raise ModelError(f"{_PREFIX}add_{key}_token is true, but {_PREFIX}{key}_token_id is missing.")
    return Vocabulary(
        kind=kind,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=_scores(metadata, len(tokens)) if spm else (),
        merges=() if spm else _strings(metadata, "merges"),
        bos=ids["bos"],
        eos=ids["eos"],
        unknown=ids["unknown"],
        end_tokens=ends,
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=spm and _flag(metadata, "add_space_prefix", True),
    )


def _kind(metadata: Metadata) -> Kind:
    name = _text(metadata, "model", None)
    if name not in _KINDS:
        raise ModelError(f"{_PREFIX}model: the tokenizer {name!r} is not known. Known: {', '.join(_KINDS)}.")
    return _KINDS[name]


def _tokens(metadata: Metadata) -> list[str]:
    tokens = [text or f"[EMPTY_{token}]" for token, text in enumerate(_strings(metadata, "tokens"))]
    if not tokens:
        raise ModelError(f"{_PREFIX}tokens is empty.")
    if len(set(tokens)) != len(tokens):
        first: dict[str, int] = {}
        for token, text in enumerate(tokens):
            if first.setdefault(text, token) != token:
                raise ModelError(f"{_PREFIX}tokens: {text!r} stands twice, at {first[text]} and {token}.")
    return tokens


def _scores(metadata: Metadata, count: int) -> list[float]:
    scores = [float(n) for n in _numbers(metadata, "scores", count, None)]
    if any(score != score for score in scores):
        raise ModelError(f"{_PREFIX}scores holds a value that is not a number.")
    return scores


def _end_tokens(tokens: list[str], types: list[int], ids: dict[str, int | None]) -> frozenset[int]:
    by_name = {text: token for token, text in enumerate(tokens) if text in _END_NAMES or text in _END_NAMES_IF_CONTROL}
    ends = {token for key in ("eos", "eot", "eom") if (token := ids[key]) is not None}
    # Harmony-style formats use <|end|> between the messages of one answer, and end it with another token.
    inner = "<|return|>" in by_name and "<|call|>" in by_name or "<|calls|>" in by_name and "<|flush|>" in by_name
    for text, token in by_name.items():
        if text == "<|end|>" and inner:
            continue
        if text in _END_NAMES or types[token] == CONTROL:
            ends.add(token)
    return frozenset(ends)


def _strings(metadata: Metadata, key: str) -> list[str]:
    value = metadata.get(_PREFIX + key)
    if value is None:
        raise ModelError(f"{_PREFIX}{key} is missing: the file has no complete tokenizer.")
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ModelError(f"{_PREFIX}{key} must be an array of strings.")
    try:
        "".join(value).encode()
    except UnicodeEncodeError:
        raise ModelError(f"{_PREFIX}{key} holds a string that is not UTF-8.") from None
    return value


def _numbers(metadata: Metadata, key: str, count: int, default: int | None) -> list[int] | list[float]:
    value = metadata.get(_PREFIX + key)
    if value is None and default is not None:
        return [default] * count
    if value is None:
        raise ModelError(f"{_PREFIX}{key} is missing: the file has no complete tokenizer.")
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list) or not all(isinstance(n, (int, float)) for n in values):
        raise ModelError(f"{_PREFIX}{key} must be an array of numbers.")
    if len(values) != count:
        raise ModelError(f"{_PREFIX}{key} has {len(values)} entries for {count} tokens.")
    return values


def _token_id(metadata: Metadata, key: str, count: int) -> int | None:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ModelError(f"{_PREFIX}{key} must be a token id.")
    token = value.__index__()
    if not 0 <= token < count:
        raise ModelError(f"{_PREFIX}{key} is {token}, outside the vocabulary of {count} tokens.")
    return int(token)


def _flag(metadata: Metadata, key: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + key, default)
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        raise ModelError(f"{_PREFIX}{key} must be true or false.")
    return bool(value)


def _text(metadata: Metadata, key: str, default: str | None) -> str:
    value = metadata.get(_PREFIX + key, default)
    if not isinstance(value, str):
        raise ModelError(f"{_PREFIX}{key} is missing or not a string: the file has no complete tokenizer.")
    return value
