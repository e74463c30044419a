"""Judges a head as a server would use it: walks the windows of texts that the model wrote to held-out prompts.

A window is the newest token and a few drafts; it gives the drafts that are what the model picked, and one token more. Counting
over all positions instead would be 0.1 too kind, for windows start where drafting has just failed. The texts (20 chat and 20 plain
prompts, greedy and at temperature 0.7, up to 96 tokens) are written once, in float32, and kept in a file (``--texts``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from strata.engine.lookup import continuation
from tools.train_mtp.head import Head
from tools.train_mtp.held_out import TEMPERATURES, Text
from tools.train_mtp.trunk import Trunk

LEAST_ALONE, LEAST_MIXED, SURE = 2, 3, 0.2
ROW_COST, BLOCK_COST, HEAD_COST = 0.1, 0.03, 0.21  # of a pass over one row: another row, a draft's block, its whole head matrix


@dataclass
class Tally:
    """What a walk over some texts came to."""

    windows: int = 0
    accepted: int = 0
    drafted: int = 0
    steps: int = 0
    tried: Counter[int] = field(default_factory=Counter)  # by place in the window
    right: Counter[int] = field(default_factory=Counter)

    @property
    def per_window(self) -> float:
        return self.accepted / max(self.windows, 1)

    def speed(self, share: float) -> float:
        """Tokens per cost, that of a plain pass being 1; ``share``: the part of the head matrix that drafting multiplies."""
        cost = self.windows + ROW_COST * self.drafted + (BLOCK_COST + HEAD_COST * share) * self.steps
        return (self.windows + self.accepted) / cost


# (ids, probabilities) [drafts, tokens of the text]: row s, column m is the draft of token m + 1 as the s-th of its chain.
Drafted = tuple[np.ndarray, np.ndarray]


@torch.inference_mode()
def chain_logits(head: Head, trunk: Trunk, text: Text, output: Tensor, drafts: int) -> Tensor:
    """float32 [drafts, len(text.ids) - text.start, rows of output]: row m of step s is about token text.start + m + 1.

    ``output``: the embedding rows of the ids that may be drafted.
    """
    results = head(trunk.embedding[torch.tensor(text.ids)][None], torch.from_numpy(text.hidden)[None], drafts)
    return torch.stack([linear(result[0, text.start :], output) for result in results])


@torch.inference_mode()
def pick_drafts(logits: Tensor, text: Text, ids: Tensor, added: Tensor | None = None) -> Drafted:
    """The drafts of ``text`` by chain_logits over ``ids``: the likeliest, or drawn with the noise ``added`` [positions, ids].

    Probabilities are at the text's temperature.
    """
    logits = logits / text.temperature if text.temperature and added is not None else logits
    best = (logits if added is None else logits + added).argmax(dim=-1)
    sure = logits.softmax(dim=-1).gather(2, best[..., None])[..., 0]
    front = ((0, 0), (text.start, 0))
    return np.pad(ids[best].numpy(), front), np.pad(sure.numpy(), front)


def walk(text: Text, propose: Callable[[int], tuple[Sequence[int], int]], tally: Tally) -> None:
    """Adds the windows of ``text``. ``propose(n)``: the drafts behind token n, and how many of the head's steps they took."""
    newest = text.start
    while newest < len(text.ids) - 1:
        drafts, steps = propose(newest)
        accepted = 0
        for place, (draft, token) in enumerate(zip(drafts, text.ids[newest + 1 :], strict=False)):
            tally.tried[place] += 1
            if draft != token:
                break
            tally.right[place] += 1
            accepted += 1
        tally.windows, tally.accepted = tally.windows + 1, tally.accepted + accepted
        tally.drafted, tally.steps = tally.drafted + len(drafts), tally.steps + steps
        newest += accepted + 1


def proposer(text: Text, drafted: Drafted | None, drafts: int, least: int, sure: float) -> Callable[[int], tuple[Sequence[int], int]]:
    """Up to ``drafts``: by lookup of at least ``least`` tokens (0: none), else the head's as far as their probability reaches ``sure``."""
    known = np.array(text.ids, np.int32)

    def propose(newest: int) -> tuple[Sequence[int], int]:
        found = continuation(known[: newest + 1], least, drafts) if least else ()
        if found or drafted is None:
            return found, 0
        chain = [(step, newest + step) for step in range(min(drafts, len(known) - newest))]
        good = [bool(drafted[1][at] >= sure) for at in chain]
        kept = good.index(False) if False in good else len(good)
        return [int(drafted[0][at]) for at in chain[:kept]], min(kept + 1, len(chain))

    return propose


def judge(texts: Sequence[Text], drafted: Sequence[Drafted | None], drafts: int, least: int, sure: float = 0.0) -> Tally:
    tally = Tally()
    for text, some in zip(texts, drafted, strict=True):
        walk(text, proposer(text, some, drafts, least, sure), tally)
    return tally


def quick(head: Head, trunk: Trunk, vocab: np.ndarray, texts: Sequence[Text], drafts: int) -> dict[str, float]:
    """Accepted per window of ``drafts``, the likeliest of 8,192 ids drafted: what a training run tells of itself."""
    ids = torch.from_numpy(vocab[:8192]).long()
    output = trunk.embedding[ids]
    found = {}
    for temperature in TEMPERATURES:
        some = [text for text in texts if text.temperature == temperature]
        drafted = [pick_drafts(chain_logits(head, trunk, text, output, drafts), text, ids) for text in some]
        found[f"T={temperature}"] = judge(some, drafted, drafts, 0).per_window
    return found
