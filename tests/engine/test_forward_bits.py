"""A row's bits are its own: whatever runs beside it, wherever its pages lie, however prompt, layers and threads are cut.

All comparisons are bitwise. Contexts are long enough to cross pages, blocks and key spans.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strata.engine import attention
from strata.engine.kv import KVKind
from strata.engine.numpy_ops import NumpyOps
from strata.messages import Segment, Window
from strata.request import Sampling
from tests.engine.running import GOLDEN, MOE, TINY, Floats, Stages, pages_for, random_ids, segment

BIASED = next(path for path in GOLDEN if path.stem == "llama-bias")
KINDS: tuple[KVKind, ...] = ("f32", "int8")


def conversation(stages: Stages, tokens: tuple[int, ...], pages: tuple[int, ...], steps: int = 3, chunk: int = 1 << 20) -> Floats:
    """Read a prompt, then decode ``steps`` given tokens: the logits of the prompt's rows and of the steps."""
    read = len(tokens) - steps
    logits = [stages.read(tokens[:read], pages, chunk=chunk)]
    logits += [stages.step((token, read + index, pages)) for index, token in enumerate(tokens[read:])]
    return np.concatenate(logits)


@pytest.fixture(scope="module", params=[(TINY, "f32"), (TINY, "int8"), (MOE[1], "f32"), (MOE[0], "int8")], ids=lambda param: param[0].stem)
def reference(request: pytest.FixtureRequest) -> tuple[Path, KVKind, tuple[int, ...], Floats]:
    path, kind = request.param
    tokens = random_ids(604)
    with Stages(path, NumpyOps(1), kind=kind) as stages:
        return path, kind, tokens, conversation(stages, tokens, tuple(range(10)))


@pytest.mark.parametrize(
    ("threads", "splits", "chunk", "order"),
    [(2, (), 1 << 20, 1), (3, (2,), 128, 2), (1, (1, 2, 3), 256, 3), (2, (3,), 384, 4)],
)
def test_threads_splits_chunks_and_page_order_change_nothing(
    reference: tuple[Path, KVKind, tuple[int, ...], Floats], threads: int, splits: tuple[int, ...], chunk: int, order: int
) -> None:
    path, kind, tokens, expected = reference
    with Stages(path, NumpyOps(threads), splits, kind) as stages:
        np.testing.assert_array_equal(conversation(stages, tokens, pages_for(10, seed=order), chunk=chunk), expected)


@pytest.mark.parametrize("path", [TINY, MOE[1]], ids=lambda path: path.stem)
def test_deterministic_reads_any_part_with_the_same_bits(path: Path) -> None:
    """Prompt rows equal decode rows, whatever part was held and wherever it was cut."""
    tokens, pages = random_ids(200), pages_for(4)
    with Stages(path, NumpyOps(2, deterministic=True)) as stages:
        expected = stages.read(tokens, pages)
        for held in (1, 63, 64, 130, 199):
            np.testing.assert_array_equal(stages.read(tokens[held:], pages, start=held), expected[held:])
        steps = [stages.step((token, position, pages)) for position, token in enumerate(tokens)]
        np.testing.assert_array_equal(np.concatenate(steps), expected)


@pytest.mark.parametrize(("held", "end"), [(70, 520), (70, 300), (126, 400), (60, 128), (1, 40), (127, 260)])
def test_chunks_after_a_held_prefix_change_nothing(held: int, end: int) -> None:
    tokens, pages = random_ids(end), pages_for(9)
    with Stages(TINY, NumpyOps(2)) as stages:
        stages.read(tokens[:held], pages)
        whole = stages.read(tokens[held:], pages, start=held)
        np.testing.assert_array_equal(stages.read(tokens[held:], pages, start=held, chunk=128), whole)


@pytest.mark.parametrize("path", [TINY, *MOE[:2]], ids=lambda path: path.stem)
def test_a_block_in_part_has_the_bits_of_the_whole_block(path: Path) -> None:
    """Padding: the rows of a long part of a block equal those rows of the full block."""
    tokens, pages = random_ids(256), pages_for(4)
    with Stages(path, NumpyOps(1)) as stages:
        whole = stages.read(tokens, pages)
        np.testing.assert_array_equal(stages.read(tokens[:250], pages), whole[:250])
        np.testing.assert_array_equal(stages.read(tokens[40:], pages, start=40), whole[40:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [TINY, BIASED, *MOE[:2]], ids=lambda path: path.stem)
def test_a_row_alone_and_among_poisoned_neighbours(path: Path, kind: KVKind) -> None:
    """Row r of 2 to 8, at any place, equals the row alone, though all others hold NaN."""
    contexts = (1, 63, 64, 65, 128, 97, 110, 5)
    with Stages(path, NumpyOps(2), kind=kind) as stages:
        tables = [pages_for(3, seed=slot, first=3 * slot) for slot in range(8)]
        tokens = [random_ids(context + 1, seed=slot) for slot, context in enumerate(contexts)]
        for table, own in zip(tables, tokens, strict=True):
            stages.read(own[:-1], table)
        rows = [(own[-1], context, table) for own, context, table in zip(tokens, contexts, tables, strict=True)]
        alone = [stages.step(row)[0] for row in rows]
        for count in range(1, 9):
            np.testing.assert_array_equal(stages.step(*rows[:count]), alone[:count])
        poison(stages, tables[1:])
        for place in range(8):
            others = rows[1:]
            logits = stages.step(*others[:place], rows[0], *others[place:])
            np.testing.assert_array_equal(logits[place], alone[0])
            assert np.isnan(np.delete(logits, place, axis=0)).all()


def poison(stages: Stages, tables: list[tuple[int, ...]]) -> None:
    """NaN in every key and value of these pages."""
    for model in stages.models:
        store = model.kv.data if model.kv.scales is None else model.kv.scales
        store[:, :, [page for table in tables for page in table]] = np.nan


def test_a_page_last_used_by_a_damaged_request_is_clean() -> None:
    """A new owner clears a page before it writes its first position: NaN of the last owner does not shine through the mask."""
    tokens = random_ids(70)
    with Stages(TINY, NumpyOps(1)) as stages:
        expected = stages.read(tokens, (4, 5))
        poison(stages, [(4, 5)])
        np.testing.assert_array_equal(stages.read(tokens, (4, 5)), expected)
        poison(stages, [(4, 5)])
        steps = [stages.step((token, position, (4, 5))) for position, token in enumerate(tokens[:3])]
        assert np.isfinite(np.concatenate(steps)).all()


def test_lots_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scratch memory for 200 rows of up to 4 tiles, and for 3 tiles at a time."""
    tokens, pages = random_ids(200), pages_for(4)
    with Stages(TINY, NumpyOps(2, deterministic=True)) as stages:
        expected = stages.read(tokens, pages)
        monkeypatch.setattr(attention, "SCRATCH_BYTES", 3 * 4 * 4 * (64 + 64 + 2))
        np.testing.assert_array_equal(stages.read(tokens, pages), expected)


def test_drafts_are_rows_like_any_other() -> None:
    """A token and three drafts in one segment equal four windows of one row."""
    tokens, pages = random_ids(68), (1, 0)
    with Stages(TINY, NumpyOps(2)) as stages:
        stages.read(tokens[:62], pages)
        one_by_one = np.concatenate([stages.step((tokens[position], position, pages)) for position in range(62, 66)])
        drafted = Segment("d", 0, 62, tokens[62:66], pages, Sampling(), num_drafts=3)
        other = segment(tokens[:1], (3,), 0, slot=1)
        together = stages.run(Window(0, "decode", 0, (other, drafted)))
        np.testing.assert_array_equal(together[1:], one_by_one)


def test_parked_pages_come_back_elsewhere_with_the_same_bits(reference: tuple[Path, KVKind, tuple[int, ...], Floats]) -> None:
    path, kind, tokens, expected = reference
    pages, moved = pages_for(10, seed=7), pages_for(10, seed=8, first=20)
    with Stages(path, NumpyOps(2), (2,), kind) as stages:
        stages.read(tokens[:601], pages)
        for model in stages.models:
            image = model.copy_out(pages)
            model.kv.clear(np.array(pages))
            model.copy_in(image, moved)
        steps = [stages.step((tokens[position], position, moved)) for position in range(601, 604)]
        np.testing.assert_array_equal(np.concatenate(steps), expected[601:])
