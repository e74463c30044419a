"""How unlike two distributions over some thousand ids are, and the slope of that, a few rows at a time.

Whole matrices of rows by ids would go through memory a dozen times for every draft; a few rows of them stay in the cache, and the slope,
which is the difference of the two distributions, is taken where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 128


@torch.no_grad()
def distributions(hidden: Tensor, output: Tensor) -> Tensor:
    """The softmax of ``hidden`` [rows, width] times ``output`` [ids, width]: [rows, ids] in the type of ``output``."""
    found = torch.empty(len(hidden), len(output), dtype=output.dtype)
    for start in range(0, len(hidden), ROWS):
        rows = slice(start, start + ROWS)
        found[rows] = torch.mm(hidden[rows].to(output.dtype), output.T).float().softmax(dim=-1)
    return found


class _Divergence(torch.autograd.Function):
    """The mean over rows of sum(target * log(target / softmax(result @ output.T)))."""

    @staticmethod
    def forward(context: Any, result: Tensor, target: Tensor, output: Tensor) -> Tensor:
        total, slope = torch.zeros(()), torch.empty_like(result)
        for start in range(0, len(result), ROWS):
            rows = slice(start, start + ROWS)
            known = target[rows].float()
            logs = torch.mm(result[rows].to(output.dtype), output.T).float().log_softmax(dim=-1)
            total += torch.xlogy(known, known).sum() - torch.dot(known.flatten(), logs.flatten())
            slope[rows] = torch.mm(logs.exp_().sub_(known).to(output.dtype), output)
        context.save_for_backward(slope / len(result))
        return total / len(result)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        slope, = context.saved_tensors
        return grads[0] * slope, None, None


def divergence(result: Tensor, target: Tensor, output: Tensor) -> Tensor:
    """In nats per row, a scalar with a gradient for ``result`` float32 [rows, width] alone.

    ``target`` [rows, ids]: what should come of it, sums of 1. ``output`` [ids, width]: the head matrix.
    """
    return _Divergence.apply(result, target, output)  # type: ignore[no-any-return,no-untyped-call]
