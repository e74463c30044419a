"""Builds the ``tokenizers`` object that turns plain text into ids: byte-level BPE, or sentencepiece's greedy merges.

Only the tokens that plain text may become are given to it (a control token's name in a text stays text by construction);
special tokens are cut out before, by ``SpecialTokens``. Nothing is fetched: the vocabulary comes from the model file.

Sentencepiece merges the neighbours whose union has the best score. That is BPE with one merge rule for every way to cut a
token into two tokens, in the order of the scores (two tokens of the same score: the lower id first).
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from strata.errors import ModelError
from strata.text.vocabulary import BYTE, NORMAL, USER_DEFINED, Vocabulary

_TEXT_TYPES = frozenset({NORMAL, USER_DEFINED, BYTE})


def build(vocabulary: Vocabulary) -> Tokenizer:
    """Raises ``ModelError`` where the merges do not fit the tokens."""
    return _byte_level(vocabulary) if vocabulary.kind == "bpe" else _sentencepiece(vocabulary)


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    ids = _ids(vocabulary)
    merges = []
    for rank, merge in enumerate(vocabulary.merges):
        # A token may begin with a space in vocabularies that are not byte-level, hence the search from 1.
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise ModelError(f"tokenizer.ggml.merges: entry {rank} ({merge!r}) does not join two tokens to a third.")
        merges.append((left, right))
    tokenizer = Tokenizer(BPE(ids, merges, ignore_merges=vocabulary.pre.ignore_merges))
    splits = [Split(Regex(pattern), "isolated") for pattern in vocabulary.pre.patterns]
    tokenizer.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    ids = _ids(vocabulary)
    unknown = None
    if vocabulary.unknown is not None:
        unknown = vocabulary.tokens[vocabulary.unknown]
        ids[unknown] = vocabulary.unknown
    pieces = {text for text, token in ids.items() if vocabulary.types[token] in (NORMAL, USER_DEFINED)}
    ranked = sorted((-vocabulary.scores[ids[text]], ids[text], text) for text in pieces)
    merges = [
        (text[:cut], text[cut:])
        for _, _, text in ranked
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
    return Tokenizer(BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {text: token for token, text in enumerate(vocabulary.tokens) if vocabulary.types[token] in _TEXT_TYPES}
