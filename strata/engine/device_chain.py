"""Runs of a draft block on a device: cells filled, and chains of steps enqueued whole and read once, at their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from strata.devices.base import Graph
from strata.engine.draft import Ask
from strata.engine.draft_ops import DraftOps
from strata.engine.draft_upload import RESULTS, DraftRows, DraftSender, Header, Rows
from strata.engine.graphs import ROW_BUCKETS, GraphCache, context_bucket, num_graphs, row_bucket
from strata.engine.pick_room import MAX_ENTRIES
from strata.kernels.sample import Choices, History, choices_of
from strata.request import Sampling

PAD = (Sampling(temperature=0.0), 0, History())
Guess = tuple[int, float]
"""A token, below 0 for a broken row, and the head's probability of it."""


@dataclass(frozen=True, slots=True)
class Start:
    """An ask that can be served, with ``room`` cells for drafts; ``source``: the hidden row before its last pick."""

    ask: Ask
    room: int
    source: int


class ChainRunner:
    """``vocabulary`` int64 ascending: the tokens drafted from, None for all; ``context``: of the longest conversation."""

    def __init__(self, ops: DraftOps, sender: DraftSender, vocabulary: NDArray[np.int64] | None, context: int) -> None:
        self.ops, self._sender, self._vocabulary, self._context = ops, sender, vocabulary, context
        self._space, self._device, self._stream = ops.space, ops.ops.device, ops.ops.stream
        self.fills, self.steps = GraphCache(len(ROW_BUCKETS)), GraphCache(num_graphs(ops.space.sizes.slots, context))
        self._found = self._device.pinned(ops.space.found.shape, np.int32)

    def fill(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """Write cells of ``rows``: token, position, line of the page tables sent, hidden row before it."""
        for start in range(0, len(rows), self._space.sizes.rows):
            tokens, positions, lines, sources = zip(*rows[start : start + self._space.sizes.rows])
            count = len(tokens)
            if count > ROW_BUCKETS[-1]:
                self.ops.fill(self._sender.send(Rows(tokens, positions, lines, sources), count))
                continue
            sent = self._sender.send(Rows(tokens, positions, lines, sources), row_bucket(count))
            self._replay(self.fills, (sent.window.count, 0), sent)

    def _replay(self, graphs: GraphCache, key: tuple[int, int], rows: DraftRows) -> None:
        def capture() -> Graph:
            with self._device.capture(self._stream) as graph:
                (self.ops.fill if graphs is self.fills else self.ops.step)(rows)
            return graph

        graphs.get(key, capture).replay(self._stream)

    def run(self, chains: Sequence[Start]) -> list[list[Guess]]:
        """``room`` guesses of each chain. ``chains``: the longest first, so that chain i has row i in every step, and line i of the page
        tables sent. Waits for the end."""
        counts = [sum(chain.room > step for chain in chains) for step in range(chains[0].room)]
        choices = self._choices(chains)
        self._space.requests.send(choices, [-1] * len(choices.real))
        headers = [Header(row_bucket(count), self._sender.pairs) for count in counts]
        rows = [self._rows(chains[:count], step, choices) for step, count in enumerate(counts)]
        context = context_bucket(max(chain.ask.position + chain.room for chain in chains), self._context)
        for number, header in enumerate(self._sender.send_steps(list(zip(headers, rows)))):
            sent = self._sender.rows(header, context)
            self._replay(self.steps, (header.rows, context), sent)
            found = self._space.found.rows(number, number + 1)
            self._device.copy(found.view((RESULTS, header.rows)), sent.results, self._stream)
        return self._read(chains, [header.rows for header in headers])

    def _rows(self, chains: Sequence[Start], step: int, choices: Choices) -> Rows:
        """The rows of a step: first each chain's last pick with the trunk's hidden row, then what the step before has left."""
        count = len(chains)
        whole = choices.whole[:count].copy()
        whole[:, 3] += step
        positions = [chain.ask.position + step for chain in chains]
        if step:
            return Rows([0] * count, positions, range(count), range(self._space.chain_at, self._space.chain_at + count), whole)
        return Rows([chain.ask.picks[-1] for chain in chains], positions, range(count), [chain.source for chain in chains], whole)

    def _choices(self, chains: Sequence[Start]) -> Choices:
        """By what drafts are drawn: as their targets will be. Pads are greedy."""
        rows = []
        for chain in chains:
            segment = chain.ask.segment
            assert segment.sampling is not None
            prompt, generated = segment.history or ((), ())
            history = History(prompt, [*generated, *chain.ask.picks]) if segment.sampling.has_penalties else History()
            rows.append((segment.sampling, chain.ask.position + 1, history))
        rows += [PAD] * (row_bucket(len(rows)) - len(rows))
        choices = choices_of(rows, self._space.sizes.vocab if self._vocabulary is None else int(self._vocabulary[-1]) + 1)
        if self._vocabulary is not None:
            choices = placed(choices, self._vocabulary)
        if len(choices.entry_bias) > MAX_ENTRIES:  # a draft without them is only a worse guess
            choices = choices_of([(replace(sampling, logit_bias=()), position, History()) for sampling, position, _ in rows], 1)
        return choices

    def _read(self, chains: Sequence[Start], counts: Sequence[int]) -> list[list[Guess]]:
        """``counts``: rows of each step, pads included."""
        found = self._found[: len(counts)]
        self._device.download(found, self._space.found.rows(0, len(counts)), self._stream)
        self._stream.synchronize()
        sure = [found[step, count : 2 * count].view(np.float32).tolist() for step, count in enumerate(counts)]
        return [[(int(found[step, row]), sure[step][row]) for step in range(chain.room)] for row, chain in enumerate(chains)]


def placed(choices: Choices, vocabulary: NDArray[np.int64]) -> Choices:
    """``choices`` whose entries name places in ``vocabulary`` (ascending) instead of tokens; entries of other tokens are left out."""
    tokens = choices.entry_ints[:, 0]
    places = np.minimum(np.searchsorted(vocabulary, tokens), len(vocabulary) - 1)
    is_in = vocabulary[places] == tokens
    ints = choices.entry_ints[is_in]
    ints[:, 0] = places[is_in]
    first = np.concatenate([[0], np.cumsum(is_in)])[choices.first_entry].astype(np.int32)
    return replace(choices, entry_ints=ints, entry_bias=choices.entry_bias[is_in], first_entry=first)
