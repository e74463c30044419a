"""The products of the rows sent to each expert, and their sum: a mixture of experts on the CPU.

A row and an expert that it goes to are a *pair*. Pairs are sorted by expert, so that every expert routed to is read once and the others
not at all, and go through row products (products.py) whatever the window: blocks of weights outside, rows inside.

Why no GEMM over an expert's rows: who shares an expert with a row depends on all rows around, and so would the row's bits; one of a
fixed shape would cost its padding for every expert. Row products keep up: a chunk of 512 gives each of 128 experts, of which a row takes
8, some 32 rows (docs/LOG.md). The outputs of a row are added in the order of its scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from strata.engine.experts import Expert, ExpertStore, LayerExperts
from strata.engine.products import Buffers, Floats, grouped_product
from strata.engine.threads import Threads

Ids = NDArray[np.int64]


class Mixture:
    """Experts from ``store``; ``swiglu`` as NumpyOps has it. A result of ``mix`` is the caller's to keep."""

    def __init__(self, store: ExpertStore, threads: Threads, swiglu: Callable[[Floats], Floats]) -> None:
        self.store = store
        self._threads, self._swiglu = threads, swiglu
        self._buffers = Buffers()

    def mix(self, x: Floats, chosen: Ids, weights: Floats, layer: LayerExperts) -> Floats:
        """``x`` [rows, width] through the experts ``chosen`` [rows, used], their outputs times ``weights`` added up: [rows, width]."""
        used = chosen.shape[1]
        order = np.argsort(chosen, axis=None, kind="stable")
        outputs = self._outputs(x[order // used], chosen.ravel()[order], layer)[:, : layer.width]
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        places = places.reshape(chosen.shape)
        total: Floats = outputs[places[:, 0]] * weights[:, :1]
        for rank in range(1, used):
            total += outputs[places[:, rank]] * weights[:, rank : rank + 1]
        return total

    def _outputs(self, x: Floats, ids: Ids, layer: LayerExperts) -> Floats:
        """Row i of ``x`` through expert ``ids[i]``, where ``ids`` never fall: [rows, width in whole blocks]."""
        edges = np.array([0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)])
        out, done = self._buffers.take("down", len(x), layer.down_rows), 0
        for lot in self.store.lots(layer, ids[edges[:-1]].tolist()):
            mine = edges[done : done + len(lot) + 1]
            rows = slice(mine[0], mine[-1])
            self._lot(x[rows], (mine - mine[0]).tolist(), lot, out[rows])
            done += len(lot)
        return out

    def _lot(self, x: Floats, edges: list[int], experts: Sequence[Expert], out: Floats) -> None:
        """Rows ``edges[i] .. edges[i + 1] - 1`` of ``x`` through the i-th expert."""
        rows = [slice(*pair) for pair in zip(edges, edges[1:])]
        blocks, _, block, _ = experts[0].gate_up.shape
        gate_up = self._buffers.take("gate_up", len(x), blocks * block)
        self._grouped(x, zip(rows, (expert.gate_up for expert in experts)), gate_up)
        hidden = self._swiglu(gate_up[:, : 2 * experts[0].inner])
        self._grouped(hidden, zip(rows, (expert.down for expert in experts)), out)

    def _grouped(self, x: Floats, groups: Iterable[tuple[slice, Floats]], out: Floats) -> None:
        self._threads.run(*grouped_product(x, list(groups), out, self._threads.count))
