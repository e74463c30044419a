"""The tables of a head: accepted drafts per window by source and text, by position, and what a cost model makes of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch

from tools.train_mtp.evaluate import LEAST_ALONE, LEAST_MIXED, SURE, Drafted, Tally, chain_logits, judge, pick_drafts
from tools.train_mtp.export import read_head
from tools.train_mtp.head import Head
from tools.train_mtp.held_out import TEMPERATURES, Text, load_texts, noise
from tools.train_mtp.trunk import Trunk

SUBSETS, USUAL = (16384, 8192, 4096), 8192
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
        for size, drafts in self.drafts.items():
            print(self.row(f"MTP, {size} ids", drafts, 0))
        print(self.row(f"MTP, {USUAL} ids, likeliest drafts also where the model draws", self.likeliest, 0))
        print(self.row(f"lookup, match >= {LEAST_ALONE}", self.nothing, LEAST_ALONE))
        print(self.row(f"lookup where it matches >= {LEAST_MIXED}, else MTP, {USUAL} ids", usual, LEAST_MIXED))
        print(f"\nright, given that the drafts before were (MTP, {USUAL} ids):", self.positions(usual))
        self.show_speeds()

    def show_speeds(self) -> None:
        print("\nmodelled speed (1 = no drafts; another row 0.1, a draft step 0.03 for the block and 0.21 for the whole head matrix):\n")
        print("| | greedy | T=0.7 |\n|---|---|---|")
        for size, drafts in self.drafts.items():
            for name, least in (("MTP", 0), ("lookup, else MTP", LEAST_MIXED)):
                for sure in (0.0, SURE):
                    cells = (self.tally(drafts, "", heat, least, sure).speed(size / self.whole) for heat in TEMPERATURES)
                    until = f", stop below {sure}" if sure else ""
                    print(f"| {name}, {size} ids{until} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
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
               count: int) -> tuple[dict[int, list[Drafted]], list[Drafted]]:
    """The drafts of every text, drawn as the model draws, by how many ids may be drafted; and the likeliest of USUAL ids."""
    every = torch.arange(len(trunk.embedding))
    subsets = {len(every): every, **{size: torch.from_numpy(vocab[:size]).long() for size in SUBSETS}}
    drafts: dict[int, list[Drafted]] = {size: [] for size in subsets}
    likeliest = []
    for text in texts:
        logits, added = chain_logits(head, trunk, text, trunk.embedding, count), None
        if text.temperature:
            added = torch.from_numpy(np.stack([noise(text, place, len(every)) for place in range(text.start, len(text.ids))]))
        for size, ids in subsets.items():
            drafts[size].append(pick_drafts(logits[..., ids], text, ids, None if added is None else added[:, ids]))
        likeliest.append(pick_drafts(logits[..., subsets[USUAL]], text, subsets[USUAL]))
    return drafts, likeliest
