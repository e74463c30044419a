"""A head to start from where there is none: the model's last layer, and a projection that gives it what it is used to.

enorm and hnorm are 1, shared_head_norm is the model's output norm; eh_proj is the ridge regression of the last layer's input at a
position on [RMS(embedding of its token), RMS(hidden state before it)]. Untrained, such a head has every fifth first draft right.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch.nn.functional import rms_norm

from tools.train_mtp.data import Stream, frequent
from tools.train_mtp.export import NEXTN
from tools.train_mtp.head import shifted
from tools.train_mtp.trunk import LAYER, Rows, Trunk

RIDGE = 4000.0
TEXTS = 64
VOCAB = 16384


def from_trunk(options: argparse.Namespace, trunk: Trunk) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(weights named as export.NAMES, draft vocabulary); waits for the first shard."""
    batch = next(iter(Stream(options.text, TEXTS, 1, options.seed)))
    width = (trunk.sizes.width,)
    rows = Rows(trunk, *batch.tokens.shape)
    inputs = []
    for position in range(batch.tokens.shape[1]):
        rows.step(batch.tokens[:, position], position)
        inputs.append(rows.last_input)
    wanted = torch.stack([one for one in inputs if one is not None], dim=1)
    both = torch.cat([rms_norm(trunk.embedding[batch.tokens], width), rms_norm(shifted(batch.hidden), width)], dim=-1)
    x, y = both[batch.learn].double(), wanted[batch.learn].double()
    projection = torch.linalg.solve(x.T @ x + RIDGE * torch.eye(x.shape[1], dtype=torch.float64), x.T @ y).T
    ones = torch.ones(width)
    nextn = dict(zip(NEXTN, (projection, ones, ones, trunk.output_norm), strict=True))
    weights = {**{name: trunk.layers[-1][name] for name in LAYER}, **nextn}
    vocab = frequent(options.text, VOCAB, np.arange(VOCAB))
    return {name: value.float().numpy() for name, value in weights.items()}, vocab
