"""How a window is laid out: which rows want logits, which go on the grid, where they write."""

from __future__ import annotations

import pytest

from strata.engine.rows import GRID, SHORT_ROWS, GridPart, RowPart, plan, wanted_rows
from strata.messages import Segment, Window
from strata.request import Sampling

TABLE = tuple(range(40, 60))


def prompt(start: int, end: int, sampling: Sampling | None = None, prompt_logprobs: int = -1) -> Segment:
    return Segment("p", 0, start, (1,) * (end - start), TABLE, sampling, prompt_logprobs=prompt_logprobs)


def test_wanted_rows() -> None:
    unfinished, finished, every = prompt(0, 4), prompt(0, 3, Sampling()), prompt(0, 2, None, 0)
    drafts = Segment("d", 1, 9, (5, 6, 7), TABLE, Sampling(), num_drafts=2)
    one = Segment("o", 2, 9, (5,), TABLE, Sampling())
    assert wanted_rows(Window(0, "prompt", 0, (unfinished,))) == ()
    assert wanted_rows(Window(0, "prompt", 0, (finished,))) == (2,)
    assert wanted_rows(Window(0, "prompt", 0, (every,))) == (0, 1)
    assert wanted_rows(Window(0, "decode", 0, (one, drafts, one))) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("start", [0, 1, 70, 80, 127, 128, 300])
@pytest.mark.parametrize("length", [1, 47, 48, 49, 57, 128, 200, 500])
def test_every_row_has_its_place(start: int, length: int) -> None:
    layout = plan(Window(0, "prompt", 0, (prompt(start, start + length),)), 64, grid=True)
    assert layout.positions[layout.real].tolist() == list(range(start, start + length))
    assert layout.pages.tolist() == [TABLE[position // 64] for position in range(start, start + length)]
    assert layout.offsets.tolist() == [position % 64 for position in range(start, start + length)]
    assert layout.fresh.tolist() == [TABLE[position // 64] for position in range(start, start + length) if position % 64 == 0]
    edges = [edge for part in layout.parts for edge in (part.start, part.stop)]
    assert edges[0] == 0 and edges[-1] == len(layout.tokens) and edges[1:-1:2] == edges[2::2]
    for part in layout.parts:
        rows = [row for row in layout.real if part.start <= row < part.stop]
        if isinstance(part, GridPart):
            assert part.position % GRID == layout.positions[part.start] % GRID == 0
            for block in range(part.start, part.stop, GRID):
                assert len([row for row in rows if block <= row < block + GRID]) > SHORT_ROWS
        else:
            # The short end of one block and the short start of the next are one part.
            assert isinstance(part, RowPart) and len(rows) == part.stop - part.start <= 2 * SHORT_ROWS


def test_a_row_has_one_tile_for_each_page_of_its_context() -> None:
    segments = (Segment("a", 0, 255, (1,), (3, 4, 8, 9), Sampling()), Segment("b", 1, 64, (1,), (10, 11), Sampling()))
    (part,) = plan(Window(0, "decode", 0, segments), 64, grid=True).parts
    assert isinstance(part, RowPart)
    assert (part.pages.tolist(), part.row_of_tile.tolist()) == ([3, 4, 8, 9, 10, 11], [0, 0, 0, 0, 1, 1])
    assert (part.firsts.tolist(), part.filled) == ([0, 4], (64, 1))


def test_lots_are_the_part_cut_between_rows() -> None:
    """Five rows of 1 to 5 tiles, at most 6 tiles a lot (but a row is never cut)."""
    segments = tuple(Segment("a", slot, 64 * slot, (1,), TABLE[slot : 2 * slot + 1], Sampling()) for slot in range(5))
    (part,) = plan(Window(0, "decode", 0, segments), 64, grid=True).parts
    assert isinstance(part, RowPart)
    lots = list(part.lots(6))
    assert [(lot.start, lot.stop, lot.num_tiles) for lot in lots] == [(0, 3, 6), (3, 4, 4), (4, 5, 5)]
    assert [lot.num_tiles for lot in part.lots(2)] == [1, 2, 3, 4, 5]
    (whole,) = part.lots(15)
    assert (whole.firsts.tolist(), whole.row_of_tile.tolist()) == (part.firsts.tolist(), part.row_of_tile.tolist())
    assert [page for lot in lots for page in lot.pages.tolist()] == part.pages.tolist()
    assert [lot.firsts.tolist() for lot in lots] == [[0, 1, 3], [0], [0]]
    assert [lot.row_of_tile.tolist() for lot in lots] == [[0, 1, 1, 2, 2, 2], [0] * 4, [0] * 5]
