"""A model's head on the CPU: one more block behind the trunk of the last stage, by the same operations.

Row k: RMS norms of the embedding of token k and of the trunk's hidden state of token k - 1, joined (embedding first) and projected to the
model's width; one block; a norm; the output matrix. What the head's file lacks is the trunk's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from strata.engine.forward import Embedding, StageModel, Weights
from strata.engine.mtp_file import Heads
from strata.engine.numpy_ops import Plan
from strata.engine.products import Matrix
from strata.engine.results import segment_rows
from strata.engine.rows import Layout
from strata.messages import Window
from strata.weights.formats import dequantize
from strata.weights.gguf import GGUFFile

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
MANY = 8  # rows for each wanted one, from which two passes over fewer operations are quicker than one over all


class NumpyMtp:
    """Implements mtp.MtpBlock: head ``number`` of ``heads`` over ``model``, the last stage of the model in ``file``.

    Its keys and values are layer ``len(model.layers) + number`` of the stage's cache. Raises ModelError for weights that cannot be read.
    """

    def __init__(self, heads: Heads, number: int, model: StageModel, file: GGUFFile) -> None:
        self.model, self.index = model, len(model.layers) + number
        block = heads.config.mtp_blocks[number]
        weights, at = Weights(heads.file, heads.config, model.ops), f"blk.{block}.nextn."
        self.layer = weights.layer(block)
        self.eh_proj = weights.matrix([at + "eh_proj.weight"])
        self.enorm, self.hnorm = weights.vector(at + "enorm.weight"), weights.vector(at + "hnorm.weight")
        norm = weights.optional(at + "shared_head_norm.weight")
        self.norm = model.output_norm if norm is None else norm
        self.output = self._output(heads, at)
        own = heads.file.tensors.get(at + "embed_tokens.weight")
        tied = model.output if model.config.tied else None
        self.embedding = Embedding(own, None) if own is not None else Embedding(file.tensors["token_embd.weight"], tied)

    def _output(self, heads: Heads, at: str) -> Matrix:
        """The output matrix; of a part of the vocabulary a copy, because scattered rows cannot be streamed."""
        own = heads.file.tensors.get(at + "shared_head_head.weight")
        self.output_rows = self.model.output.weights.__getitem__ if own is None else Embedding(own, None).rows
        if heads.vocabulary is not None:
            return self.model.ops.matrix([self.output_rows(heads.vocabulary)])
        return self.model.output if own is None else self.model.ops.matrix([dequantize(own)])

    def admit(self, places: Ids, tokens: Ids) -> None:
        """As MtpBlock; only for a part of the vocabulary, whose output matrix is the head's own."""
        self.output.weights[places] = self.output_rows(tokens)

    def run(self, window: Window, hidden: Floats, wanted: Sequence[int]) -> tuple[Floats, Floats]:
        """As MtpBlock. Rows that nobody wants get their cells and, where they are many, no more."""
        model, ops, places = self.model, self.model.ops, list(wanted)
        has_many = len(hidden) > MANY * len(places)
        with ops.window(window, model.kv, model.config.group) as plan:
            layout = plan.layout
            if len(layout.fresh):
                model.kv.clear(layout.fresh, slice(self.index, self.index + 1))
            x, turns = self._joined(layout, hidden, plan), model.rope.turns(layout.positions)
            step = model.write_cells if has_many else model.block
            step(x, self.index, self.layer, plan, turns)
            x = x[layout.real[places]]
        if has_many and places:
            with ops.window(only(window, places), model.kv, model.config.group) as plan:
                model.block(x, self.index, self.layer, plan, model.rope.turns(plan.layout.positions))
        out = ops.rms_norm(x, self.norm, model.config.eps)
        return out, ops.logits(out, self.output)

    def _joined(self, layout: Layout, hidden: Floats, plan: Plan) -> Floats:
        """What goes into the block: [layout rows, width], the caller's to keep."""
        ops, eps, width = self.model.ops, self.model.config.eps, self.model.config.width
        joined = np.zeros((len(layout.tokens), 2 * width), np.float32)
        joined[layout.real, :width] = ops.rms_norm(self.embedding.rows(layout.tokens[layout.real]), self.enorm, eps)
        joined[layout.real, width:] = ops.rms_norm(hidden, self.hnorm, eps)
        return ops.linear(joined, self.eh_proj, plan).copy()


def only(window: Window, rows: Sequence[int]) -> Window:
    """The given rows of a window, rising, each a segment of its own, to be computed one by one."""
    wanted, segments = set(rows), []
    for segment, first in segment_rows(window):
        for row in range(first, first + len(segment.tokens)):
            if row in wanted:
                at = row - first
                segments.append(replace(segment, start=segment.start + at, tokens=segment.tokens[at:at + 1]))
    return Window(window.id, "decode", window.group, tuple(segments))
