"""Numbers behind the drafts of a device: hidden states and logits of the head, what a chain's steps leave for each other, and the trunk's
hidden states that it all begins with. Right are llama.cpp's float32 and the head on the CPU.

Int8 makes a fiftieth of a difference, and where it changes which experts a row takes, a half: of the head's forty rows that is one."""

from dataclasses import replace

import numpy as np
import pytest

from strata.engine.device_chain import Start
from strata.engine.draft import Ask
from strata.engine.draft_upload import Rows
from strata.messages import Segment
from strata.request import Sampling
from tests.engine.drafting import HEAD, Talk, floats, rewritten
from tests.engine.running import ids
from tests.engine.test_draft_counts import Slow
from tests.engine.test_mtp_block import before, models, window
from tests.kernels.test_device_drafts import GLM, players

pytestmark = pytest.mark.cxx
GOLDEN = np.load(GLM.with_suffix(".npz"))
TOKENS, ROWS = ids(GOLDEN["ids"]), 16  # of a step


@pytest.fixture(scope="module")
def player():
    with players() as player:
        yield player


def fill(player, *texts):
    """Cells of texts that begin as ``TOKENS`` does, one page for each; llama.cpp's hidden states of the trunk are put into the store."""
    runner, ops = player.mtp._runner, player.mtp._runner.ops.ops
    ops.device.upload(runner.ops.space.store.rows(0, 40), np.ascontiguousarray(GOLDEN["trunk_hidden"]), ops.stream)
    player.mtp._sender.send_tables([(line,) for line in range(len(texts))])
    runner.fill([(token, k, line, k - 1) for line, text in enumerate(texts) for k, token in enumerate(text)])


def download(player, buffer):
    ops, array = player.mtp._runner.ops.ops, np.empty(buffer.shape, np.float32)
    ops.device.download(array, buffer, ops.stream)
    ops.stream.synchronize()
    return array


def of_the_head(player):
    """Hidden states and logits of all ``TOKENS``, each by a step of its own; row k behind the cells of the rows before it."""
    ops, found = player.mtp._runner.ops, []
    fill(player, TOKENS[:39])
    for first in range(0, 40, ROWS):
        places = range(first, min(40, first + ROWS))
        rows = player.mtp._sender.send(Rows(TOKENS[first:first + ROWS], places, [0] * len(places), [k - 1 for k in places]), len(places))
        ops.step(replace(rows, window=replace(rows.window, context=256)))
        chain = ops.space.store.rows(ops.space.chain_at, ops.space.chain_at + len(places))
        found.append((download(player, chain), download(player, ops.space.logits.rows(0, len(places)))))
    return [np.concatenate(parts) for parts in zip(*found)]


def off(found, right):
    """How far each row is off, the worst last, in standard deviations of what is right."""
    assert found.shape == right.shape
    return np.sort(np.sqrt(np.mean((found - right) ** 2, axis=1))) / right.std()


def test_numbers_of_the_head_are_those_of_float32_within_int8(player):
    hidden, logits = of_the_head(player)
    assert off(hidden, GOLDEN["mtp_hidden"])[-2] < 0.05
    assert off(logits, GOLDEN["mtp_logits"])[-2] < 0.05


def test_numbers_of_the_trunk_are_those_of_float32_within_int8(player):
    talk = Talk(TOKENS, (15,), count=9)
    player.read(0, talk)
    found = off(download(player, player.mtp._runner.ops.space.store.rows(0, 40)), GOLDEN["trunk_hidden"])
    assert np.median(found) < 0.1 and found[-1] < 0.8


def own(metadata, tensors):
    """What may be the head's own is, and nothing like the trunk's."""
    rng = np.random.default_rng(0)
    for name in ("shared_head_head", "embed_tokens"):
        tensors[f"{HEAD}nextn.{name}.weight"] = floats(rng.standard_normal((512, 256)) / 16)
    tensors[f"{HEAD}nextn.shared_head_norm.weight"] = floats(rng.uniform(0.5, 1.5, 256))


def nothing(metadata, tensors):
    """All that may be missing is."""
    for name in ("shared_head_head", "embed_tokens", "shared_head_norm"):
        del tensors[f"{HEAD}nextn.{name}.weight"]


@pytest.mark.parametrize("change", [own, nothing])
def test_what_the_head_lacks_is_the_trunks_and_nothing_else(change, tmp_path):
    path = rewritten("glm4moe-iq3s", tmp_path / "m.gguf", change)
    with models(path) as (_, head):
        right = head.run(window("decode", 0, GOLDEN["ids"]), before(GOLDEN["trunk_hidden"]), range(40))
    with players(path) as player:
        for found, wanted in zip(of_the_head(player), right, strict=True):
            assert off(found, wanted)[-2] < 0.05


def test_each_step_of_a_chain_goes_on_where_the_one_before_it_ended(player):
    """Chains behind different texts, some shorter than others: the drafts of a loop that computes everything anew, where int8 allows."""
    equal, slow = [], Slow(GLM)
    for lengths in ((40, 33, 17, 9), (38, 21, 36, 2)):
        texts = [TOKENS[:length] for length in lengths]
        fill(player, *(text[:-1] for text in texts))
        chains = []
        for line, (text, room) in enumerate(zip(texts, (3, 3, 2, 1))):
            segment = Segment("r", line, len(text) - 2, text[-2:-1], (line,), Sampling(temperature=0))
            chains.append(Start(Ask(segment, text[-1:], room), room, len(text) - 2))
        for text, guesses in zip(texts, player.mtp._runner.run(chains)):
            wanted = slow.drafts(text, len(guesses))
            equal += [draft == right for (draft, _), right in zip(guesses, wanted)]
    slow.close()
    assert len(equal) == 18 and sum(equal) >= 15
