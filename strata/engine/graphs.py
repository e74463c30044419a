"""Which graphs a decode stage can have, how many it keeps, and what they cost.

A decode window is padded to a row bucket, its attention's grid to a context bucket (a power of two of splits); each pair has a graph,
captured when first needed. Long contexts and many slots have more pairs than are worth their memory, so that only ``MAX_GRAPHS``
are kept: the one unused for longest goes, and is captured again (some milliseconds) should it be needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from strata.devices.base import Graph
from strata.engine.architecture import ModelConfig
from strata.kernels.attention import SPLIT, num_splits

ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MAX_GRAPHS = 48
DENSE_LAUNCHES, ROUTED_LAUNCHES, SHARED_LAUNCHES = 8, 11, 2  # of a layer, at most: see kernel_ops.py
END_LAUNCHES = 3  # embedding, last norm and output matrix
NODE_BYTES = 16 << 10  # of device memory for each launch of a graph, with its share of the graph itself: an allowance, not a measurement

Key = tuple[int, int]


def row_bucket(rows: int) -> int:
    """The rows that a decode window of ``rows`` rows is padded to. Raises ValueError beyond the largest bucket."""
    for bucket in ROW_BUCKETS:
        if rows <= bucket:
            return bucket
    raise ValueError(f"a decode window of {rows} rows; at most {ROW_BUCKETS[-1]} fit")


def context_bucket(length: int, longest: int) -> int:
    """Positions that decode attention's grid covers for a window whose longest row has ``length`` of at most ``longest``."""
    splits = 1
    while splits * SPLIT < length:
        splits *= 2
    return min(splits, num_splits(longest)) * SPLIT


def row_buckets(max_rows: int) -> list[int]:
    """The buckets of decode windows of 1 to ``max_rows`` rows."""
    return sorted({row_bucket(rows) for rows in range(1, min(max_rows, ROW_BUCKETS[-1]) + 1)})


def num_graphs(max_rows: int, context: int) -> int:
    """Graphs that a stage keeps at most."""
    contexts = (num_splits(context) - 1).bit_length() + 1
    return min(len(row_buckets(max_rows)) * contexts, MAX_GRAPHS)


def launches_of(config: ModelConfig, blocks: Iterable[int]) -> int:
    """Launches of a decode window through these blocks, at most."""
    routed = ROUTED_LAUNCHES + (SHARED_LAUNCHES if config.experts and config.experts.shared_width else 0)
    return END_LAUNCHES + sum(routed if config.routed(block) else DENSE_LAUNCHES for block in blocks)


def graph_bytes(launches: int, max_rows: int, context: int) -> int:
    """Device memory set aside for the graphs of windows of so many launches each."""
    return num_graphs(max_rows, context) * launches * NODE_BYTES


class GraphCache:
    """At most ``capacity`` graphs by their buckets, (rows, context); ``captured`` counts the captures."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()
        self.captured = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: Key, capture: Callable[[], Graph]) -> Graph:
        """The graph of ``key``, captured where it is not there."""
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._graphs) >= self._capacity:
                self._graphs.popitem(last=False)  # a replay under way ends undisturbed: the driver frees a graph after its last run
            graph = self._graphs[key] = capture()
            self.captured += 1
        self._graphs.move_to_end(key)
        return graph
