"""Lets the model write: shards of token ids with the hidden states that the head will be given, until stopped.

Texts are written many at a time, all from the same position on and all to the same length. Given text goes the same way as written
text, one token a pass, so that there is one kind of pass; an answer that ends early is followed by another question. A shard appears
under its name only when it is whole.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from strata.text.tokenizer import Tokenizer
from strata.weights.gguf import GGUFFile
from tools.train_mtp.prompts import Part, script
from tools.train_mtp.trunk import Rows, Trunk

SHARD_TEXTS = 64
LONGEST_GIVEN = 80


def open_tokenizer(model: Path) -> Tokenizer:
    file = GGUFFile.open(model)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    file.close()
    return tokenizer


class Text:
    """One text in the making: ``tokens`` so far; ``learned[m]``: token m + 1 is one that the head is to foresee."""

    def __init__(self, parts: Iterator[Part], tokenizer: Tokenizer) -> None:
        self.parts, self.tokenizer = parts, tokenizer
        self.given: deque[int] = deque()
        self.part, self.left = Part(), 0
        self._go_on()
        self.tokens = [self.given.popleft()]
        self.learned: list[bool] = []
        self._go_on()

    @property
    def writes(self) -> bool:
        """Whether the next token is the model's."""
        return not self.given

    def extend(self, picked: int) -> None:
        """Go on with the next given token, or with the one that the model ``picked``."""
        self.learned.append(self.writes and self.part.learn)
        if self.given:
            self.tokens.append(self.given.popleft())
        elif picked in self.tokenizer.end_tokens:
            # What follows an answer begins with the end that the model wrote just now.
            self._next_part()
            self.tokens.append(self.given.popleft() if self.given else picked)
        else:
            self.left -= 1
            self.tokens.append(picked)
        self._go_on()

    def _go_on(self) -> None:
        """To the next part, where this one is at its end."""
        while not self.given and self.left <= 0:
            self._next_part()

    def _next_part(self) -> None:
        """Take up the next part of the script; one without end where there is none."""
        self.part = next(self.parts, Part(limit=1 << 20, temperature=1.0))
        self.left = self.part.limit
        if self.part.text:
            ids = self.tokenizer.encode(self.part.text, add_special=False, parse_special=True)[:LONGEST_GIVEN]
            self.given.extend(ids)


def pick(logits: Tensor, temperatures: Tensor, noise: torch.Generator) -> Tensor:
    """int64 [rows]: the likeliest token where the temperature is 0, else one drawn (where the running sum reaches a uniform number, which
    needs one number a row; a race needs one for every token and costs as much as the model's pass)."""
    drawn = temperatures > 0
    picks = logits.argmax(dim=-1)
    if drawn.any():
        weights = (logits[drawn] / temperatures[drawn, None]).softmax(dim=-1)
        sums = weights.cumsum(dim=-1)
        reached = torch.rand(len(sums), 1, generator=noise) * sums[:, -1:]
        picks[drawn] = torch.searchsorted(sums, reached, right=True)[:, 0].clamp_max(sums.shape[1] - 1)
    return picks


class Writer:
    """Writes ``options.rows`` texts at once, and then shards of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.tokenizer = options, open_tokenizer(options.model)
        self.trunk = Trunk(options.model, options.dtype)
        self.rows = Rows(self.trunk, options.rows, options.length)
        self.hidden = np.zeros((options.rows, options.length, self.trunk.sizes.width), np.float16)
        self.noise = torch.Generator().manual_seed(options.seed)
        self.number = self.shards = self.written = 0

    def write(self) -> None:
        """One round: every text from its first token to its last, then the shards."""
        texts = [Text(script(self.options.seed, self.number + row), self.tokenizer) for row in range(self.options.rows)]
        self.number += len(texts)
        for position in range(self.options.length):
            hidden = self.rows.step(torch.tensor([text.tokens[-1] for text in texts]), position)
            self.hidden[:, position] = hidden.numpy()
            picks = self._picks(texts, hidden)
            for row, text in enumerate(texts):
                text.extend(picks.get(row, 0))
        for start in range(0, len(texts), SHARD_TEXTS):
            self._write_shard(texts[start : start + SHARD_TEXTS], self.hidden[start : start + SHARD_TEXTS])

    def _picks(self, texts: list[Text], hidden: Tensor) -> dict[int, int]:
        """The model's next token for the rows that are its to write."""
        writing = [row for row, text in enumerate(texts) if text.writes]
        if not writing:
            return {}
        temperatures = torch.tensor([texts[row].part.temperature for row in writing])
        return dict(zip(writing, pick(self.trunk.logits(hidden[writing]), temperatures, self.noise).tolist(), strict=True))

    def _write_shard(self, texts: list[Text], hidden: np.ndarray) -> None:
        """tokens int32, learn bool [texts, length], hidden float16 [texts, length, width]."""
        tokens = np.array([text.tokens[:-1] for text in texts], np.int32)
        learn = np.array([text.learned for text in texts])
        self.written += int(learn.sum())
        target = self.options.out / f"text-{self.options.seed}-{self.shards:05}.npz"
        part = target.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, tokens=tokens, learn=learn, hidden=hidden)
        part.replace(target)
        self.shards += 1


def generate(options: argparse.Namespace) -> None:
    """Write shards into ``options.out`` for ``options.minutes`` (a round that has begun is finished)."""
    options.out.mkdir(parents=True, exist_ok=True)
    writer, start = Writer(options), time.monotonic()
    while time.monotonic() - start < options.minutes * 60:
        writer.write()
        took = time.monotonic() - start
        print(f"{took / 60:.0f} min: {writer.shards} shards, {writer.written} tokens written, {writer.written / took:.0f}/s", flush=True)
