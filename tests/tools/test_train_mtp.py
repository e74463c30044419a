"""tools/train_mtp: its block against a slow loop over cells, its walk against windows counted by hand, its files against gguf's."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tools/train_mtp needs torch, which is for development only")

from strata.weights.gguf import GGUFFile  # noqa: E402
from tests.house.source import ROOT  # noqa: E402
from tools.train_mtp import divergence, evaluate, export, generate, head, prompts, topics, train, trunk  # noqa: E402
from tools.train_mtp.held_out import Text  # noqa: E402

SIZES = trunk.Sizes(width=32, heads=4, kv_heads=2, eps=1e-5, base=10000.0)
SHIPPED = ROOT / "configs/heads/smollm2-135m-mtp.gguf"


def small_head() -> tuple[dict[str, np.ndarray], head.Head]:
    draw = np.random.default_rng(5)
    shapes = {"nextn.eh_proj": (32, 64), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
              "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}
    weights = {name: draw.normal(0, 0.3, shapes.get(name, (32,))).astype(np.float32) for name in export.NAMES}
    return weights, head.Head(weights, SIZES)


class SlowBlock:
    """One cell at a time, in float64, the cells in a list: what Head.forward does for all chains at once."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.w = {name: value.astype(np.float64) for name, value in weights.items()}

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + SIZES.eps) * self.w[name]

    def turned(self, x: np.ndarray, position: int) -> np.ndarray:
        heads = x.reshape(-1, 8)
        angle = position * SIZES.base ** (-np.arange(4) / 4)
        pairs = (heads[:, :4] + 1j * heads[:, 4:]) * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag], axis=1)

    def run(self, embedded: np.ndarray, fed: np.ndarray, position: int, cells: list) -> np.ndarray:
        x = self.w["nextn.eh_proj"] @ np.concatenate([self.norm(embedded, "nextn.enorm"), self.norm(fed, "nextn.hnorm")])
        a = self.norm(x, "attn_norm")
        cells.append((self.turned(self.w["attn_k"] @ a, position), (self.w["attn_v"] @ a).reshape(-1, 8)))
        queries = self.turned(self.w["attn_q"] @ a, position)
        mixed = []
        for index, query in enumerate(queries):
            scores = np.array([query @ keys[index // 2] for keys, _ in cells]) / np.sqrt(8)
            shares = np.exp(scores - scores.max())
            mixed.append(sum(share * values[index // 2] for share, (_, values) in zip(shares / shares.sum(), cells, strict=True)))
        x = x + self.w["attn_output"] @ np.concatenate(mixed)
        f = self.norm(x, "ffn_norm")
        gate = self.w["ffn_gate"] @ f
        x = x + self.w["ffn_down"] @ (gate / (1 + np.exp(-gate)) * (self.w["ffn_up"] @ f))
        return self.norm(x, "nextn.shared_head_norm")


def test_the_loss_and_its_slope_are_those_of_torch() -> None:
    torch.manual_seed(0)
    rows = 2 * divergence.ROWS + 7
    output, known, result = torch.randn(90, 32), torch.randn(rows, 32), torch.randn(rows, 32, requires_grad=True)
    target = divergence.distributions(known, output)
    assert torch.allclose(target, (known @ output.T).softmax(dim=-1), atol=1e-6)
    slopes = []
    for loss in (
        divergence.divergence(result, target, output),
        torch.nn.functional.kl_div((result @ output.T).log_softmax(dim=-1), target, reduction="batchmean"),
    ):
        (3 * loss).backward()
        assert result.grad is not None
        slopes.append((loss.item(), result.grad.clone()))
        result.grad = None
    assert slopes[0][0] == pytest.approx(slopes[1][0], rel=1e-5)
    assert torch.allclose(slopes[0][1], slopes[1][1], atol=1e-6)


def test_all_chains_at_once_are_what_a_slow_drafter_gives() -> None:
    weights, block = small_head()
    draw = np.random.default_rng(6)
    embedded, hidden = draw.normal(size=(2, 9, 32)).astype(np.float32)
    with torch.no_grad():
        results = [result[0].numpy() for result in block(torch.from_numpy(embedded)[None], torch.from_numpy(hidden)[None], 3)]
    slow, cells = SlowBlock(weights), []
    for place in range(9):
        fed = slow.run(embedded[place], hidden[place - 1] if place else np.zeros(32), place, cells)
        np.testing.assert_allclose(results[0][place], fed, atol=1e-4)
        chain = list(cells)
        for step in range(1, min(3, 9 - place)):
            fed = slow.run(embedded[place + step], fed, place + step, chain)
            np.testing.assert_allclose(results[step][place + step], fed, atol=1e-4)


def test_a_walk_counts_windows_as_a_server_does() -> None:
    text = Text("plain", 0, 0.0, 1, [7, 1, 2, 3, 4, 5, 6])
    drafts = {1: [2, 3, 9], 4: [9], 5: [6]}
    tally = evaluate.Tally()
    evaluate.walk(text, lambda newest: (drafts[newest], len(drafts[newest])), tally)
    # Windows at tokens 1 (two right: to 4), 4 (none: to 5) and 5 (one right: to the end).
    assert (tally.windows, tally.accepted, tally.drafted, tally.steps) == (3, 3, 5, 5)
    assert (tally.tried, tally.right) == ({0: 3, 1: 1, 2: 1}, {0: 2, 1: 1})


def test_drafts_stop_where_the_head_is_unsure() -> None:
    text = Text("plain", 0, 0.0, 1, [7, 1, 2, 3, 4, 5, 6])
    ids = np.arange(21).reshape(3, 7)
    sure = np.full((3, 7), 0.9)
    sure[1, 3] = 0.1
    propose = evaluate.proposer(text, (ids, sure), 3, 0, 0.2)
    assert propose(2) == ([2], 2)
    assert propose(3) == ([3, 11, 19], 3)


def test_a_draft_is_learned_where_its_whole_chain_is() -> None:
    learn = torch.tensor([[False, True, True, True, False, True]])
    assert train.chained(learn, 0).tolist() == learn.tolist()
    assert train.chained(learn, 1).tolist() == [[False, False, True, True, False, False]]
    assert train.chained(learn, 2).tolist() == [[False, False, False, True, False, False]]


def test_rows_of_q_and_k_go_to_pairs_and_back() -> None:
    matrix = np.arange(32, dtype=np.float32).reshape(16, 2)
    assert export.paired_rows(matrix, 2)[:4, 0].tolist() == [0.0, 8.0, 2.0, 10.0]
    assert (export.halved_rows(export.paired_rows(matrix, 2), 2) == matrix).all()


def test_q8_0_is_ggmls() -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: tools/test.py installs it")
    matrix = np.random.default_rng(1).normal(0, 0.1, (48, 64)).astype(np.float32)
    matrix[3] = 0
    expected = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    assert export.q8_0(matrix).tobytes() == expected.tobytes()


def test_the_shipped_head_survives_reading_and_writing(tmp_path: Path) -> None:
    weights, vocab = export.read_head(SHIPPED)
    trunk_file = GGUFFile.open(SHIPPED)
    assert export.metadata_of(trunk_file, vocab)["llama.block_count"] == 32  # of a trunk with as many layers as this file says
    trunk_file.close()
    export.write_head(tmp_path / "again.gguf", SHIPPED, weights, vocab)
    again = GGUFFile.open(tmp_path / "again.gguf")
    assert np.array_equal(again.tensors["blk.31.attn_q.weight"].data, shipped_bytes("blk.30.attn_q.weight"))
    again.close()


def shipped_bytes(name: str) -> np.ndarray:
    file = GGUFFile.open(SHIPPED)
    data = np.array(file.tensors[name].data)
    file.close()
    return data


class Letters:
    """A tokenizer whose tokens are letters; "." ends an answer."""

    end_tokens = frozenset({ord(".")})

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [ord(letter) for letter in text]


def test_a_text_alternates_given_and_written_tokens() -> None:
    parts = iter([prompts.Part("ab"), prompts.Part(limit=9, learn=True), prompts.Part(".cd"), prompts.Part(limit=2, learn=True)])
    text = generate.Text(parts, Letters())  # type: ignore[arg-type]
    for picked in "?x.??zwv":
        text.extend(ord(picked))
    assert "".join(map(chr, text.tokens)) == "abx.cdzwv"
    assert text.learned == [False, True, True, False, False, True, True, False]


def test_scripts_are_the_same_for_a_seed_and_wide() -> None:
    def beginning(number: int) -> list[prompts.Part]:
        parts = prompts.script(1, number)
        return [next(parts) for _ in range(2)]

    many = [beginning(number) for number in range(200)]
    assert many == [beginning(number) for number in range(200)]
    assert len({tuple(part.text for part in parts) for parts in many}) > 150


def test_no_held_out_prompt_is_about_a_training_topic() -> None:
    forms = {"Python", "email"}  # a language and a kind of text, which both sides ask for; what about is another matter
    for prompt in (*topics.HELD_OUT_CHAT, *topics.HELD_OUT_PLAIN):
        words = " ".join(re.findall(r"[\w'-]+", prompt.lower()))
        assert {topic for topic in topics.TOPICS if f" {topic.lower()} " in f" {words} "} <= forms, prompt


def test_tokens_are_drawn_as_often_as_they_are_likely_and_impossible_ones_never() -> None:
    likely = torch.tensor([0.0, 0.5, 0.3, 0.0, 0.2])
    picks = generate.pick(likely.log().repeat(20000, 1), torch.ones(20000), torch.Generator().manual_seed(1))
    np.testing.assert_allclose(torch.bincount(picks, minlength=5) / 20000, likely, atol=0.015)
    assert generate.pick(likely.log().repeat(3, 1), torch.zeros(3), torch.Generator()).tolist() == [1, 1, 1]
