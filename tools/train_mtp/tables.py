"""The tables of a head: accepted drafts per window by source and text, by position, and what a cost model makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tools.train_mtp.evaluate import LEAST_ALONE, LEAST_MIXED, SURE, Drafted, Tally, chain_logits, judge, pick_drafts
from tools.train_mtp.head import Head
from tools.train_mtp.held_out import TEMPERATURES, Text, noise
from tools.train_mtp.trunk import Trunk

SUBSETS, USUAL = (16384, 8192, 4096), 8192
GROUPS = (("greedy chat", "chat", 0.0), ("greedy plain", "plain", 0.0), ("greedy all", "", 0.0), ("T=0.7 all", "", 0.7))


def print_tables(head: Head, trunk: Trunk, vocab: np.ndarray, texts: Sequence[Text]) -> None:
    drafts, likeliest = all_drafts(head, trunk, vocab, texts)
    nothing: list[Drafted | None] = [None] * len(texts)
    print(f"{len(texts) // 2} held-out prompts, walked in windows of 3 drafts at most; accepted per window:\n")
    print("| | " + " | ".join(name for name, _, _ in GROUPS) + " |\n|---|" + "---|" * len(GROUPS))
    for size in drafts:
        print(row(f"MTP, {size} ids", texts, drafts[size], 0))
    print(row(f"MTP, {USUAL} ids, likeliest drafts also where the model draws", texts, likeliest, 0))
    print(row(f"lookup, match >= {LEAST_ALONE}", texts, nothing, LEAST_ALONE))
    print(row(f"lookup where it matches >= {LEAST_MIXED}, else MTP, {USUAL} ids", texts, drafts[USUAL], LEAST_MIXED))
    print(f"\nright, given that the drafts before were (MTP, {USUAL} ids):", positions(texts, drafts[USUAL]))
    print("\nmodelled speed (1 = no drafts; another row 0.1, a draft step 0.03 for the block and 0.21 for the whole head matrix):\n")
    print("| | greedy | T=0.7 |\n|---|---|---|")
    for size in drafts:
        for name, least in (("MTP", 0), ("lookup, else MTP", LEAST_MIXED)):
            for sure in (0.0, SURE):
                cells = (speed(texts, drafts[size], least, sure, heat, size / len(trunk.embedding)) for heat in TEMPERATURES)
                until = f", stop below {sure}" if sure else ""
                print(f"| {name}, {size} ids{until} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    print("| lookup alone | " + " | ".join(f"{speed(texts, nothing, LEAST_ALONE, 0.0, heat, 0.0):.2f}" for heat in TEMPERATURES) + " |")


def all_drafts(head: Head, trunk: Trunk, vocab: np.ndarray, texts: Sequence[Text]) -> tuple[dict[int, list[Drafted]], list[Drafted]]:
    """The drafts of every text, drawn as the model draws, by how many ids may be drafted; and the likeliest of USUAL ids."""
    every = torch.arange(len(trunk.embedding))
    subsets = {len(every): every, **{size: torch.from_numpy(vocab[:size]).long() for size in SUBSETS}}
    drafts: dict[int, list[Drafted]] = {size: [] for size in subsets}
    likeliest = []
    for text in texts:
        logits, added = chain_logits(head, trunk, text, trunk.embedding), None
        if text.temperature:
            added = torch.from_numpy(np.stack([noise(text, place, len(every)) for place in range(text.start, len(text.ids))]))
        for size, ids in subsets.items():
            drafts[size].append(pick_drafts(logits[..., ids], text, ids, None if added is None else added[:, ids]))
        likeliest.append(pick_drafts(logits[..., subsets[USUAL]], text, subsets[USUAL]))
    return drafts, likeliest


def tally(texts: Sequence[Text], drafts: Sequence[Drafted | None], kind: str, temperature: float, least: int, sure: float = 0.0) -> Tally:
    """The walk over the texts of one kind ("" for all) and temperature."""
    chosen = [(text, one) for text, one in zip(texts, drafts, strict=True) if kind in ("", text.kind) and text.temperature == temperature]
    return judge([text for text, _ in chosen], [one for _, one in chosen], least, sure)


def row(name: str, texts: Sequence[Text], drafts: Sequence[Drafted | None], least: int) -> str:
    cells = (tally(texts, drafts, kind, temperature, least).per_window for _, kind, temperature in GROUPS)
    return f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |"


def positions(texts: Sequence[Text], drafts: Sequence[Drafted | None]) -> str:
    found = []
    for name, temperature in zip(("greedy", "T=0.7"), TEMPERATURES, strict=True):
        walked = tally(texts, drafts, "", temperature, 0)
        found.append(name + " " + " / ".join(f"{right / tried:.2f}" for right, tried in zip(walked.right, walked.tried, strict=True)))
    return ", ".join(found)


def speed(texts: Sequence[Text], drafts: Sequence[Drafted | None], least: int, sure: float, temperature: float, share: float) -> float:
    return tally(texts, drafts, "", temperature, least, sure).speed(share)
