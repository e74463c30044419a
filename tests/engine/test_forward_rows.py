"""How a window is laid out: which rows want logits, which go on the grid, where they write."""

from __future__ import annotations

import pytest

from strata.engine.rows import GRID, GridPart, RowPart, plan, wanted_rows
from strata.messages import Segment, Window
from strata.request import Sampling

SHORT_ROWS = 48
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
    layout = plan(Window(0, "prompt", 0, (prompt(start, start + length),)), 64, SHORT_ROWS)
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
