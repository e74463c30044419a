"""A draft block's operations on a device: one more layer, behind kernels that join its input and before a head that draws its drafts.

Two kinds of runs. ``fill`` writes the cells of rows whose tokens are known: keys and values need no attention and no network, so a row
costs the input's projection and a third of a layer. ``step`` drafts a token for each row: the whole block, its norm (whose result the next
step is joined with), the output matrix over the draft vocabulary, the draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from strata.devices.base import Buffer, KernelName
from strata.engine.device_space import HEAD_ROWS, DraftSpace
from strata.engine.draft_upload import DraftRows
from strata.engine.families import ModelConfig
from strata.engine.kernel_ops import KernelOps, kernels_of
from strata.engine.kernel_weights import DeviceLayer
from strata.kernels import draft as draft_kernels
from strata.kernels import sample as sample_kernels
from strata.kernels.draft import join_norms, move_rows
from strata.kernels.embed import embed
from strata.kernels.matmul import linear, linear_name
from strata.kernels.pages import PageShape
from strata.kernels.rms_norm import KEPT, rms_norm
from strata.kernels.sample import DraftHead, sample
from strata.kernels.tensors import Matrix

FILL_LAUNCHES, STEP_LAUNCHES = 6, 6  # the latter: what a step has beside its layer


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """``norms``: of the embedding and of the hidden row; ``vocabulary`` int32: the token of each row of ``output``."""

    layer: DeviceLayer
    norms: tuple[Buffer, Buffer]
    eh_proj: Matrix
    norm: Buffer
    output: Matrix
    embedding: Matrix
    vocabulary: Buffer


class DraftOps:
    """``index``: the block's layer in the pages of ``ops``. Enqueues only."""

    def __init__(self, ops: KernelOps, weights: DraftWeights, space: DraftSpace, index: int) -> None:
        self.ops, self.weights, self.space, self._index = ops, weights, space, index

    def fill(self, rows: DraftRows) -> None:
        """Keys and values of ``rows``."""
        self._enter(rows)
        self.ops.store(self._index, self.weights.layer, rows.window, add=False)

    def step(self, rows: DraftRows) -> None:
        """A draft for each row, in place of its token, and how sure the head is of it; hidden rows into the store, for the next step."""
        ops, space, weights, count = self.ops, self.space, self.weights, rows.window.count
        self._enter(rows)
        ops.block(self._index, weights.layer, rows.window, add=False)
        hidden, delta, x = ops.space.hidden.rows(0, count), ops.space.delta.rows(0, count), ops.space.normed.rows(0, count)
        kept = space.store.rows(space.chain_at, space.chain_at + count)
        rms_norm(ops.device, rows.window.wanted, hidden, delta, weights.norm, ops.config.eps, x, ops.stream, kept)
        logits, scratch = space.logits.rows(0, count), space.scratch.rows(0, count)
        linear(ops.device, weights.output, x, logits, ops.stream)
        choices = replace(space.requests.choices(count, 0), whole=rows.whole)
        sample(ops.device, logits, scratch, choices, rows.window.tokens, ops.stream, DraftHead(weights.vocabulary, rows.sure))

    def _enter(self, rows: DraftRows) -> None:
        """The residual stream begins: embedding and hidden row, normed, joined and projected."""
        ops, space, weights, count = self.ops, self.space, self.weights, rows.window.count
        embedding, joined = ops.space.delta.rows(0, count), space.joined.rows(0, count)
        embed(ops.device, weights.embedding, rows.window.tokens, embedding, ops.stream)
        join_norms(ops.device, embedding, space.store, rows.sources, weights.norms, ops.config.eps, joined, ops.stream)
        linear(ops.device, weights.eh_proj, joined, ops.space.hidden.rows(0, count), ops.stream)

    def move(self, moves: Buffer) -> None:
        """Hidden rows of the store to other places: ``moves`` int32 [count, 2] of (from, to)."""
        if moves.shape[0]:
            move_rows(self.ops.device, self.space.store, moves, self.ops.stream)


def draft_kernels_of(config: ModelConfig, pages: PageShape, weights: DraftWeights, counts: Sequence[int]) -> Iterator[KernelName]:
    """Every kernel that runs of ``counts`` rows need, beside those of the stage."""
    yield from (draft_kernels.JOIN, draft_kernels.MOVE, draft_kernels.CLEAR, KEPT, sample_kernels.DRAFT)
    yield from kernels_of(config, pages, [weights.layer], [weights.embedding], counts)
    for count in counts:
        yield from (linear_name(weights.eh_proj.layout, count), linear_name(weights.output.layout, min(count, HEAD_ROWS)))
