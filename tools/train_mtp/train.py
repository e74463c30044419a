"""Trains a head on shards of text while they are being written, and keeps the newest weights as a head file.

Loss. For each draft the divergence of the head's distribution from the model's, both over the most frequent ids and the batch's own, at
temperature 0.7 (between greedy and free text), plus a smooth L1 of the head's hidden states to the model's, which keeps what is fed
back alike. Batches take turns with one, two and three drafts, so that drafts weigh 1, 2/3 and 1/3: three in every batch cost 1.5 times
as much and the first draft, without which there is no second, learns no more from it. The model's embedding, head matrix and hidden
states are fixed.

Steps are counted by time: the rate warms up, stays, and falls to 3 % at the end of ``--minutes``, so that a run on a busy machine still
ends well.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from tools.train_mtp.data import Batch, Stream, frequent
from tools.train_mtp.divergence import distributions, divergence
from tools.train_mtp.evaluate import quick
from tools.train_mtp.export import read_head, write_head
from tools.train_mtp.head import Head
from tools.train_mtp.held_out import load_texts
from tools.train_mtp.start import from_trunk
from tools.train_mtp.trunk import Trunk

DRAFTS = 3
SHARPEN = 1 / 0.7
HIDDEN_WEIGHT = 0.1
FALL_TO = 0.03


def chained(learn: Tensor, step: int) -> Tensor:
    """Where the draft of ``step`` (0 is the first) and all before it in its chain are to be foreseen: bool like ``learn``."""
    wanted = learn.clone()
    for back in range(1, step + 1):
        wanted[:, back:] &= learn[:, :-back]
        wanted[:, :back] = False
    return wanted


def losses(head: Head, batch: Batch, embedding: Tensor, output: Tensor, drafts: int) -> list[Tensor]:
    """The loss of each of so many drafts, in nats per token (and HIDDEN_WEIGHT of the hidden states' distance).

    ``output``: the rows of the head matrix that the loss runs over, times SHARPEN.
    """
    results = head(embedding[batch.tokens], batch.hidden, drafts)
    target = distributions(batch.hidden[batch.learn], output)
    found = []
    for step, result in enumerate(results):
        wanted = chained(batch.learn, step)
        unlike = divergence(result[wanted], target[wanted[batch.learn]], output)
        found.append(unlike + HIDDEN_WEIGHT * smooth_l1_loss(result[wanted], batch.hidden[wanted]))
    return found


class Rate:
    """The share of the full learning rate after ``seconds`` of training."""

    def __init__(self, minutes: float, steady: float) -> None:
        self.total, self.steady, self.warm = minutes * 60, steady, min(60.0, minutes * 3)

    def __call__(self, seconds: float) -> float:
        if seconds < self.warm:
            return max(seconds / self.warm, 0.02)
        done = max(seconds / self.total - self.steady, 0.0) / (1 - self.steady)
        return FALL_TO + (1 - FALL_TO) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def optimizers(head: Head, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """The matrices by Muon or AdamW, the norms by AdamW."""
    matrices = [p for p in head.parameters() if p.dim() == 2]
    vectors = {"params": [p for p in head.parameters() if p.dim() == 1], "weight_decay": 0.0}
    common = {"lr": options.rate, "betas": (0.9, 0.95), "weight_decay": 0.01}
    if options.optimizer == "adamw":
        return [torch.optim.AdamW([{"params": matrices}, vectors], **common)]
    muon = torch.optim.Muon(matrices, lr=options.muon_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW([vectors], **common)]


class Training:
    """The head, its average and their optimizers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.trunk = Trunk(options.model)
        weights, self.vocab = from_trunk(options, self.trunk) if options.start is None else read_head(options.start)
        self.head = Head(weights, self.trunk.sizes)
        self.mean = Head(weights, self.trunk.sizes)
        self.optimizers = optimizers(self.head, options)
        self.full = [[group["lr"] for group in one.param_groups] for one in self.optimizers]
        self.output = (self.trunk.embedding * SHARPEN).to(options.dtype)

    def step(self, batch: Batch, rate: float, drafts: int) -> list[float]:
        """One update at ``rate`` of the full rates. Gives the loss of each of ``drafts`` drafts."""
        for one, full in zip(self.optimizers, self.full, strict=True):
            for group, value in zip(one.param_groups, full, strict=True):
                group["lr"] = value * rate
        ids = torch.cat([torch.from_numpy(self.vocab[: self.options.vocab]).long(), batch.tokens.flatten()]).unique()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.options.dtype == torch.bfloat16):
            found = losses(self.head, batch, self.trunk.embedding, self.output[ids], drafts)
        torch.stack(found).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for one in self.optimizers:
            one.step()
            one.zero_grad()
        with torch.no_grad():
            for mean, now in zip(self.mean.parameters(), self.head.parameters(), strict=True):
                mean.lerp_(now, 1 - self.options.average)
        return [loss.item() for loss in found]

    def save(self, path: Path) -> None:
        """The averaged weights with the ids most frequent so far."""
        vocab = frequent(self.options.text, len(self.vocab), self.vocab)
        write_head(path, self.options.model, self.mean.weights(), vocab)


def train(options: argparse.Namespace) -> None:
    """Train for ``options.minutes``; every ``options.every`` minutes tell how it goes and write ``options.out``."""
    torch.manual_seed(options.seed)
    training = Training(options)
    texts = load_texts(options, training.trunk)
    rate, steps = Rate(options.minutes, options.steady), 0
    recent: list[list[float]] = [[] for _ in range(DRAFTS)]
    start = told = time.monotonic()
    for batch in Stream(options.text, options.batch, options.passes, options.seed):
        now = time.monotonic()
        for losses_of, loss in zip(recent, training.step(batch, rate(now - start), 1 + steps % DRAFTS), strict=False):
            losses_of.append(loss)
        steps += 1
        ended = now - start > options.minutes * 60
        if ended or now - told > options.every * 60:
            told = now
            training.save(options.out)
            loss = " ".join(f"{np.mean(some):.3f}" for some in recent if some)
            accepted = quick(training.mean, training.trunk, training.vocab, texts, DRAFTS)
            judged = " ".join(f"{name} {value:.3f}" for name, value in accepted.items())
            print(f"{(now - start) / 60:.0f} min, step {steps}, rate {rate(now - start):.2f}, loss {loss}; accepted: {judged}", flush=True)
            recent = [[] for _ in range(DRAFTS)]
        if ended:
            return
