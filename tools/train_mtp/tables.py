"""The tables of a head: accepted drafts per window by source and text, by position, and what a cost model makes of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from strata.engine.draft_vocab import NO_PLACE, DraftVocabulary
from tools.train_mtp.evaluate import LEAST_ALONE, LEAST_MIXED, SURE, Drafted, Tally, chain_logits, judge, pick_drafts
from tools.train_mtp.export import read_head
from tools.train_mtp.head import Head
from tools.train_mtp.held_out import TEMPERATURES, Text, load_texts, noise
from tools.train_mtp.trunk import Trunk

USUAL = "1,024 ids and those of the text"
VOCABULARIES = {"all 49,152 ids": 49152, "16,384 ids": 16384, "8,192 ids": 8192, "4,096 ids": 4096, USUAL: 2048}
"""By which ids may be drafted: how many there are at a time."""
GROUPS = (("greedy chat", "chat", 0.0), ("greedy plain", "plain", 0.0), ("greedy all", "", 0.0), ("T=0.7 all", "", 0.7))


def evaluate(options: argparse.Namespace) -> None:
    """Print the tables of one head."""
    trunk = Trunk(options.model)
    weights, vocab = read_head(options.head)
    Tables(Head(weights, trunk.sizes), trunk, vocab, load_texts(options, trunk), options.drafts).show()


class Tables:
    """What ``head`` drafts of ``texts``, ``count`` drafts a window at most, and how that is told."""

    def __init__(self, head: Head, trunk: Trunk, vocab: np.ndarray, texts: Sequence[Text], count: int) -> None:
        self.texts, self.count, self.whole = texts, count, len(trunk.embedding)
        self.drafts, self.likeliest = all_drafts(head, trunk, vocab, texts, count)
        self.nothing: list[Drafted | None] = [None] * len(texts)

    def show(self) -> None:
        print(f"{len(self.texts) // 2} held-out prompts, walked in windows of {self.count} drafts at most; accepted per window:\n")
        print("| | " + " | ".join(name for name, _, _ in GROUPS) + " |\n|---|" + "---|" * len(GROUPS))
        usual = self.drafts[USUAL]
        for ids, drafts in self.drafts.items():
            print(self.row(f"MTP, {ids}", drafts, 0))
        print(self.row(f"MTP, {USUAL}, likeliest drafts also where the model draws", self.likeliest, 0))
        print(self.row(f"lookup, match >= {LEAST_ALONE}", self.nothing, LEAST_ALONE))
        print(self.row(f"lookup where it matches >= {LEAST_MIXED}, else MTP, {USUAL}", usual, LEAST_MIXED))
        print(f"\nright, given that the drafts before were (MTP, {USUAL}):", self.positions(usual))
        self.show_speeds()

    def show_speeds(self) -> None:
        print("\nmodelled speed (1 = no drafts; another row 0.1, a draft step 0.03 for the block and 0.21 for the whole head matrix):\n")
        print("| | greedy | T=0.7 |\n|---|---|---|")
        for ids, drafts in self.drafts.items():
            for name, least in (("MTP", 0), ("lookup, else MTP", LEAST_MIXED)):
                for sure in (0.0, SURE):
                    cells = (self.tally(drafts, "", heat, least, sure).speed(VOCABULARIES[ids] / self.whole) for heat in TEMPERATURES)
                    until = f", stop below {sure}" if sure else ""
                    print(f"| {name}, {ids}{until} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
        alone = (self.tally(self.nothing, "", heat, LEAST_ALONE).speed(0.0) for heat in TEMPERATURES)
        print("| lookup alone | " + " | ".join(f"{cell:.2f}" for cell in alone) + " |")

    def tally(self, drafts: Sequence[Drafted | None], kind: str, temperature: float, least: int, sure: float = 0.0) -> Tally:
        """The walk over the texts of one kind ("" for all) and temperature."""
        chosen = [(text, one) for text, one in zip(self.texts, drafts, strict=True)
                  if kind in ("", text.kind) and text.temperature == temperature]
        return judge([text for text, _ in chosen], [one for _, one in chosen], self.count, least, sure)

    def row(self, name: str, drafts: Sequence[Drafted | None], least: int) -> str:
        cells = (self.tally(drafts, kind, temperature, least).per_window for _, kind, temperature in GROUPS)
        return f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |"

    def positions(self, drafts: Sequence[Drafted | None]) -> str:
        found = []
        for name, temperature in zip(("greedy", "T=0.7"), TEMPERATURES, strict=True):
            walked = self.tally(drafts, "", temperature, 0)
            found.append(name + " " + " / ".join(f"{walked.right[place] / walked.tried[place]:.2f}" for place in sorted(walked.tried)))
        return ", ".join(found)


def all_drafts(head: Head, trunk: Trunk, vocab: np.ndarray, texts: Sequence[Text],
               count: int) -> tuple[dict[str, list[Drafted]], list[Drafted]]:
    """The drafts of every text, drawn as the model draws, by which ids may be drafted; and the likeliest of the USUAL ones."""
    every = torch.arange(len(trunk.embedding))
    drafts: dict[str, list[Drafted]] = {name: [] for name in VOCABULARIES}
    likeliest = []
    for text in texts:
        logits, added = chain_logits(head, trunk, text, trunk.embedding, count), None
        if text.temperature:
            added = torch.from_numpy(np.stack([noise(text, place, len(every)) for place in range(text.start, len(text.ids))]))
        for name, size in VOCABULARIES.items():
            if name == USUAL:
                known = logits.masked_fill(unknown(text, vocab[:size], count, len(every)), float("-inf"))
                drafts[name].append(pick_drafts(known, text, every, added))
                likeliest.append(pick_drafts(known, text, every))
                continue
            ids = torch.from_numpy(vocab[:size]).long() if size < len(every) else every
            drafts[name].append(pick_drafts(logits[..., ids], text, ids, None if added is None else added[:, ids]))
    return drafts, likeliest


def unknown(text: Text, frequent: np.ndarray, count: int, whole: int) -> Tensor:
    """Where a server knows no such id, whose places begin with the ``frequent`` ones: bool [count, tokens of the answer, whole]."""
    vocabulary, lacks = DraftVocabulary(frequent.astype(np.int64), whole), []
    seen = 0
    for end in range(text.start + 1, len(text.ids) + 1):
        vocabulary.see(text.ids[seen:end])
        lacks.append(vocabulary.place_of == NO_PLACE)
        seen = end
    # The s-th draft of a window is about a token that lies s further on than what the window has read.
    return torch.from_numpy(np.stack([np.stack([lacks[max(row - step, 0)] for row in range(len(lacks))]) for step in range(count)]))
