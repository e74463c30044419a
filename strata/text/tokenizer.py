"""Text to tokens and back, exactly as the model was trained to read it.

Two rules decide what a special token's name in a text means. A CONTROL token's name is text unless the caller says
``parse_special``; a USER_DEFINED token's name (runs of spaces, markup a model was trained to read whole) is always that
token, as in the model's own tokenizer. BOS and EOS are added where the file says so, and never twice.

Normalisation: none, also where a family's own tokenizer composes characters (NFC), so that ``decode(encode(text)) == text``.
A byte for which a vocabulary has no token is left out, as its own tokenizer does.

Safe to use from several threads; long texts are encoded without holding the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from strata.errors import ClientError, ContextExceeded
from strata.text.backend import build
from strata.text.specials import SpecialTokens
from strata.text.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Metadata, Vocabulary, read_vocabulary

_HIDDEN = frozenset({CONTROL, UNKNOWN, UNUSED})
_SPACE = "▁"  # sentencepiece writes a space so


def _byte_table() -> dict[int, str]:
    """Byte-level BPE writes a byte as itself where it is printable Latin-1, else as one of the characters from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    table = {byte: chr(byte) for byte in shown}
    table.update({0x100 + n: chr(byte) for n, byte in enumerate(hidden)})
    return table


_BYTES = _byte_table()


class Tokenizer:
    """Attributes: ``vocab_size``; ``bos``, ``eos``: ids or None; ``end_tokens``: the ids that end an answer;
    ``add_bos``: whether a prompt of this model begins with BOS; ``specials``: every special token by its text;
    ``markup``: the texts among them that are USER_DEFINED."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = build(vocabulary)
        self.vocab_size = len(vocabulary.tokens)
        self.bos, self.eos = vocabulary.bos, vocabulary.eos
        self.end_tokens = vocabulary.end_tokens
        self.add_bos = vocabulary.add_bos
        types = vocabulary.types
        special = {text: token for token, text in enumerate(vocabulary.tokens) if types[token] in (CONTROL, USER_DEFINED, UNKNOWN)}
        markup = {text: token for text, token in special.items() if types[token] == USER_DEFINED}
        self.specials = SpecialTokens(special)
        self._user_defined = SpecialTokens(markup)
        self.markup = frozenset(markup)
        self._longest = max(map(len, vocabulary.tokens))

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Tokenizer:
        """From a GGUF's metadata. Raises ``ModelError`` naming the key that is missing, wrong or unknown."""
        return cls(read_vocabulary(metadata))

    def check_length(self, text: str, most: int | None) -> None:
        """Raises ``ContextExceeded`` for a text that must have more than ``most`` tokens, without the time that tokenising takes.

        No token stands for more characters than its own name has.
        """
        least = -(-len(text) // self._longest)
        if most is not None and least > most:
            raise ContextExceeded(least, 0, most, at_least=True)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``. ``add_special``: with BOS and EOS where the model wants them; ``parse_special``: the names of
        control tokens in the text become those tokens. Raises ``ClientError`` for a text that is not valid Unicode."""
        ids: list[int] = []
        fresh = True
        for start, end, special in (self.specials if parse_special else self._user_defined).split(text):
            if special is None:
                ids += self.encode_plain(text[start:end], fresh)
            else:
                ids.append(special)
            fresh = special is not None
        return self.add_special(ids) if add_special else ids

    def encode_plain(self, text: str, fresh: bool = False) -> list[int]:
        """Ids of a text in which nothing is special. ``fresh``: it begins a text or follows a special token (sentencepiece puts
        a space there)."""
        if self._vocabulary.kind == "spm":
            text = (_SPACE if fresh and self._vocabulary.add_space_prefix else "") + text.replace(" ", _SPACE)
        try:
            # The batch call is the one that lets go of the interpreter lock; `encode` holds it (3 s for 4 MB).
            return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except TypeError:  # its way to refuse a string that has no UTF-8 form
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise ClientError("The text is not valid Unicode: it holds a lone surrogate.") from None
            raise

    def add_special(self, ids: list[int]) -> list[int]:
        """``ids`` with BOS in front and EOS behind where the model wants them and they are not there already."""
        if self.add_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        if self._vocabulary.add_eos and self.eos is not None and ids[-1:] != [self.eos]:
            ids = [*ids, self.eos]
        return ids

    def token_text(self, token: int) -> str:
        """The token as the vocabulary writes it (``Ġthe``, ``<0x0A>``, ``<|im_end|>``). Raises ``ClientError`` for an unknown id."""
        if not 0 <= token < self.vocab_size:
            raise ClientError(f"Token id {token} is outside the vocabulary of {self.vocab_size} tokens.", param="tokens")
        return self._vocabulary.tokens[token]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of UTF-8 text that the token stands for; they need not be whole characters."""
        text, kind = self.token_text(token), self._vocabulary.types[token]
        if kind == BYTE:
            return _byte_of(text)
        if kind != NORMAL:
            return text.encode()
        if self._vocabulary.kind == "spm":
            return text.replace(_SPACE, " ").encode()
        return text.translate(_BYTES).encode("latin-1") if all(ord(c) in _BYTES for c in text) else text.encode()

    def is_special(self, token: int) -> bool:
        """Whether the token is structure (control, unknown, unused) and not text."""
        return self._vocabulary.types[token] in _HIDDEN

    def decode(self, ids: Iterable[int], *, keep_special: bool = True) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD. The space that sentencepiece put in front is taken off."""
        kept = [token for token in ids if keep_special or not self.is_special(token)]
        parts = [self.token_bytes(token) for token in kept]
        first = 1 if kept and kept[0] == self.bos else 0
        if self._vocabulary.add_space_prefix and len(parts) > first and parts[first].startswith(b" "):
            parts[first] = parts[first][1:]
        return b"".join(parts).decode("utf-8", "replace")


def _byte_of(text: str) -> bytes:
    """``<0x0A>`` -> ``b"\\n"``; anything else that is typed BYTE stands for its own text."""
    try:
        return bytes([int(text[3:5], 16)]) if len(text) == 6 and text.startswith("<0x") else text.encode()
    except ValueError:
        return text.encode()
