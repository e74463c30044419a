"""How each ``tokenizer.ggml.pre`` cuts a text into the words that byte-pair merges may not cross.

A word is split by each pattern in turn; what lies between two matches is a word too. The patterns are those of the models'
own tokenizer files (tiktoken's families, GPT-2's, DeepSeek's), in Oniguruma's syntax. Why a closed table: a wrong pattern
gives plausible but wrong tokens, which nobody notices, so an unknown name is refused instead of guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import ModelError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """``patterns`` in order; ``ignore_merges``: a word that is a token is taken whole, whatever the merges say;
    ``add_bos``: what holds where the file has no ``tokenizer.ggml.add_bos_token``."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACE}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACE}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
)
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_TEKKEN = (_CASED_WORDS % ("", "")) + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
_GPT4O = (_CASED_WORDS % (_CONTRACTION + "?", _CONTRACTION + "?")) + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u0800-\u9fa5\uac00-\ud7ff]+", r"\p{N}")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_SEED = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|" + _WORD + r"|\p{N}|" + _SYMBOLS + r"|\s*[\r\n]|\s+(?!\S)|\s+"

_TABLE: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer(_DEFAULT)),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", PreTokenizer((_LLAMA3,), True, True)),
    ("chatglm-bpe dbrx smaug-bpe", PreTokenizer((_LLAMA3,))),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_SPACE}"), ignore_merges=True)),
    ("qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez solar-open grok-2 kormo", PreTokenizer((_QWEN2,))),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4", PreTokenizer((_GPT2,))),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", _GPT2))),
    ("tekken", PreTokenizer((_TEKKEN,), True, True)),
    ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((_GPT4O,))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK3)),
    ("deepseek-coder", PreTokenizer(_DEEPSEEK_CODER)),
    ("falcon", PreTokenizer(_FALCON)),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for names, pre in _TABLE for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rules for a value of ``tokenizer.ggml.pre``; raises ``ModelError`` for a name that is not in the table."""
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise ModelError(
            f"tokenizer.ggml.pre: the pre-tokenizer {name!r} is not known, so this model's text would be cut wrongly. "
            f"Known: {', '.join(sorted(PRE_TOKENIZERS))}."
        )
    return found
