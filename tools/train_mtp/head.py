"""The MTP block in torch, run over whole texts with the drafts of every position at once.

Cell m pairs token m with the model's hidden state of position m - 1 (zeros before the first). Draft 1 behind token m is read from cell m;
draft s, whose cell is m, belongs to the chain that started at cell m - s + 1: it is given what the cell before it made, not the model's
hidden state, and sees the true cells up to its chain's start and its own chain's cells behind. This is what a server computes, for as
long as the drafts before it are right; so one pass gives all drafts of all windows that a walk over the text could meet.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm, silu

from tools.train_mtp.export import NAMES
from tools.train_mtp.trunk import Sizes, rotate, turns


class Head(nn.Module):
    """One block; parameters are named as in export.NAMES, with "_" for "."."""

    def __init__(self, weights: Mapping[str, np.ndarray], sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        for name in NAMES:
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.tensor(np.asarray(weights[name], np.float32))))

    def weights(self) -> dict[str, np.ndarray]:
        return {name: self.get_parameter(name.replace(".", "_")).detach().numpy().copy() for name in NAMES}

    def forward(self, embedded: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """For each of ``steps`` drafts, the hidden states after the head's norm, float32 [texts, length, width].

        ``embedded`` and ``hidden`` [texts, length, width]: the tokens' embeddings and the model's hidden states after its output norm.
        Row m of result s - 1 foresees token m + 1, as does row m of ``hidden``; its first s - 1 rows mean nothing.
        """
        length = embedded.shape[1]
        turn = tuple(table[None, :, None] for table in turns(self.sizes, length))
        row, column = torch.arange(length)[:, None], torch.arange(length)
        fed, chain, results = shifted(hidden), [], []
        for step in range(steps):
            result, cells = self._block(embedded, fed, turn, chain, column > row - step)
            chain.insert(0, cells)
            results.append(result)
            fed = shifted(result)
        return results

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x.float(), (self.sizes.width,), weight, self.sizes.eps)

    def _block(self, embedded: Tensor, fed: Tensor, turn: tuple[Tensor, ...], chain: list, unseen: Tensor) -> tuple[Tensor, tuple]:
        """One step for all cells: its result and its own keys and values. ``chain``: those of earlier steps, the latest first."""
        both = torch.cat([self._norm(embedded, self.nextn_enorm), self._norm(fed, self.nextn_hnorm)], dim=-1)
        x = linear(both, self.nextn_eh_proj).float()
        normed = self._norm(x, self.attn_norm)
        split = (*x.shape[:2], -1, self.sizes.head_dim)
        q = rotate(linear(normed, self.attn_q).view(split).float(), *turn).transpose(1, 2)
        k = rotate(linear(normed, self.attn_k).view(split).float(), *turn).transpose(1, 2)
        v = linear(normed, self.attn_v).view(split).float().transpose(1, 2)
        mixed = self._attend(q, (k, v), chain, unseen)
        x = x + linear(mixed, self.attn_output)
        normed = self._norm(x, self.ffn_norm)
        x = x + linear(silu(linear(normed, self.ffn_gate)) * linear(normed, self.ffn_up), self.ffn_down)
        return self._norm(x, self.nextn_shared_head_norm), (k, v)

    def _attend(self, q: Tensor, own: tuple[Tensor, Tensor], chain: list, unseen: Tensor) -> Tensor:
        """Over the true cells (those of the first step) that are seen, and, after the first step, the chain's own cells one by one."""
        group = self.sizes.heads // self.sizes.kv_heads
        true_k, true_v = (cells.repeat_interleave(group, dim=1) for cells in (chain[-1] if chain else own))
        scores = (q @ true_k.transpose(2, 3)).float().masked_fill(unseen, float("-inf"))
        extra = [] if not chain else [own, *chain[:-1]]
        behind = [tuple(pad(c, (0, 0, back, 0))[:, :, : c.shape[2]].repeat_interleave(group, dim=1) for c in cells)
                  for back, cells in enumerate(extra)]
        scores = torch.cat([scores, *((q * k).sum(dim=-1, keepdim=True) for k, _ in behind)], dim=-1)
        shares = (scores * self.sizes.head_dim**-0.5).softmax(dim=-1)
        length = true_k.shape[2]
        mixed = (shares[..., :length] @ true_v).float()
        for index, (_, v) in enumerate(behind):
            mixed = mixed + shares[..., length + index, None] * v
        return mixed.transpose(1, 2).flatten(2)


def shifted(states: Tensor) -> Tensor:
    """Row m - 1 in row m; zeros in row 0."""
    return pad(states, (0, 0, 1, 0))[:, :-1]
