"""Buckets of decode windows, and how many graphs are kept for them."""

import pytest

from strata.engine.graphs import MAX_GRAPHS, GraphCache, context_bucket, graph_bytes, num_graphs, row_bucket, row_buckets


def test_rows_are_padded_to_few_sizes():
    assert [row_bucket(n) for n in (1, 5, 8, 9, 32)] == [1, 6, 8, 12, 32]
    assert row_buckets(5) == [1, 2, 3, 4, 6] and row_buckets(100)[-1] == 32
    with pytest.raises(ValueError, match="33 rows"):
        row_bucket(33)


def test_contexts_are_covered_by_powers_of_two_of_splits():
    assert [context_bucket(n, 1500) for n in (1, 256, 257, 513, 1025, 1500)] == [256, 256, 512, 1024, 1536, 1536]


@pytest.mark.parametrize("context", [1, 256, 257, 1500, 4096, 100_000, 262_144])
@pytest.mark.parametrize("max_rows", [1, 2, 7, 32])
def test_as_many_graphs_are_planned_as_there_can_be(max_rows, context):
    keys = {(row_bucket(rows), context_bucket(length, context)) for rows in range(1, max_rows + 1) for length in range(1, context + 1, 128)}
    keys |= {(row_bucket(rows), context_bucket(context, context)) for rows in range(1, max_rows + 1)}
    assert num_graphs(max_rows, context) == min(len(keys), MAX_GRAPHS)
    assert graph_bytes(35, max_rows, context) == num_graphs(max_rows, context) * 35 * (16 << 10)


def test_the_graph_unused_for_longest_makes_room():
    cache = GraphCache(2)
    made = []

    def capture(name):
        def make():
            made.append(name)
            return name
        return make

    for name in ("a", "b", "a", "c", "a", "b"):
        assert cache.get((ord(name), 256), capture(name)) == name
        assert len(cache) <= 2
    assert made == ["a", "b", "c", "b"] and cache.captured == 4
