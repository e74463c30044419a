"""The texts that a head is judged on: what the model writes to held-out prompts, in float32, once; then kept in a file."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tools.train_mtp.generate import open_tokenizer
from tools.train_mtp.prompts import DEFAULT_SYSTEM
from tools.train_mtp.topics import HELD_OUT_CHAT, HELD_OUT_PLAIN
from tools.train_mtp.trunk import Rows, Trunk

ANSWER = 96
TEMPERATURES = (0.0, 0.7)


@dataclass
class Text:
    """``ids`` with the prompt, of which ``start`` tokens; ``hidden`` float32 [len(ids), width]."""

    kind: str
    number: int
    temperature: float
    start: int
    ids: list[int]
    hidden: np.ndarray = field(default_factory=lambda: np.zeros(0))


def noise(text: Text, position: int, vocab: int) -> np.ndarray:
    """The Gumbel noise of one choice: the same for the model and for a drafter that draws as it does."""
    return np.random.Generator(np.random.Philox(key=[text.number, position])).gumbel(size=vocab).astype(np.float32)


def write_texts(options: argparse.Namespace, trunk: Trunk) -> list[Text]:
    tokenizer = open_tokenizer(options.model)
    texts = []
    for number, prompt in enumerate([*HELD_OUT_CHAT, *HELD_OUT_PLAIN]):
        chat = number < len(HELD_OUT_CHAT)
        asked = f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(asked if chat else prompt, add_special=False, parse_special=True)
        texts += [Text("chat" if chat else "plain", number, temperature, len(ids), list(ids)) for temperature in TEMPERATURES]
    rows = Rows(trunk, len(texts), max(text.start for text in texts) + ANSWER)
    states = np.zeros((len(texts), rows.length, trunk.sizes.width), np.float32)
    ended = [False] * len(texts)
    for position in range(rows.length):
        given = torch.tensor([text.ids[min(position, len(text.ids) - 1)] for text in texts])
        hidden = rows.step(given, position)
        states[:, position] = hidden.numpy()
        logits = trunk.logits(hidden).numpy()
        for row, text in enumerate(texts):
            if position == len(text.ids) - 1 and not ended[row]:
                drawn = logits[row] if not text.temperature else logits[row] / text.temperature + noise(text, position, logits.shape[1])
                text.ids.append(int(drawn.argmax()))
                ended[row] = text.ids[-1] in tokenizer.end_tokens or len(text.ids) == text.start + ANSWER
    for row, text in enumerate(texts):
        text.hidden = states[row, : len(text.ids)]
    return texts


def save_texts(path: Path, texts: list[Text]) -> None:
    """Numbers and names per text, and the ids and hidden states of all texts behind each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {name: np.array([getattr(text, name) for text in texts]) for name in ("kind", "number", "temperature", "start")}
    lengths = np.array([len(text.ids) for text in texts])
    ids, hidden = np.concatenate([text.ids for text in texts]), np.concatenate([text.hidden for text in texts])
    np.savez_compressed(path, lengths=lengths, ids=ids, hidden=hidden, **about)


def load_texts(options: argparse.Namespace, trunk: Trunk) -> list[Text]:
    """The texts in ``options.texts``, written first where that file is missing. Delete it after changing prompts or model."""
    path: Path = options.texts
    if not path.exists():
        save_texts(path, write_texts(options, trunk))
    stored = np.load(path)
    ends = np.cumsum(stored["lengths"])
    ids, hidden = np.split(stored["ids"], ends[:-1]), np.split(stored["hidden"], ends[:-1])
    about = zip(stored["kind"], stored["number"], stored["temperature"], stored["start"], ids, hidden, strict=True)
    return [Text(str(kind), int(number), float(heat), int(start), some.tolist(), rows) for kind, number, heat, start, some, rows in about]
