"""For the tests of drafting: models whose head drafts well, head files of their own, and a player of the slot machine that uses drafts."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from strata.config import Settings
from strata.engine.load import load_engine
from strata.engine.pipeline import Pipeline
from strata.messages import NO_DRAFTS, DraftLimits, Segment, SegmentResult, TokenLogprob, Tokens, Window, WindowDone
from strata.request import Sampling
from strata.weights.formats import BY_NAME
from strata.weights.gguf import GGUFFile
from strata.weights.writer import StoredTensor, write_gguf

TINY = Path(__file__).parent.parent / "data" / "tiny"
HEAD = "blk.4."
PAGE = 64
GREEDY = Sampling(temperature=0)

Change = Callable[[dict[str, object], dict[str, StoredTensor]], object]


def rewritten(name: str, target: Path, change: Change) -> Path:
    """A copy of a tiny model whose metadata and tensors ``change`` has edited."""
    with GGUFFile.open(TINY / f"{name}.gguf") as file:
        metadata = dict(file.metadata)
        tensors = {each: StoredTensor(tensor.type, tensor.shape, tensor.data) for each, tensor in file.tensors.items()}
        change(metadata, tensors)
        write_gguf(target, metadata, tensors)
    return target


def floats(values: np.ndarray) -> StoredTensor:
    return StoredTensor(BY_NAME["F32"], values.shape, values.astype(np.float32))


def exact(metadata: Mapping[str, object], tensors: dict[str, StoredTensor]) -> None:
    """The head of the accept fixtures as it was before it was quantised: it passes the embedding through, to the trunk's output matrix.

    Their IQ3_S holds no identity: rows of one large value and zeros come back as 0.08 to 1.03 in all places.
    """
    width = tensors["output_norm.weight"].shape[0]
    tensors[HEAD + "nextn.eh_proj.weight"] = floats(np.eye(width, 2 * width))
    del tensors[HEAD + "nextn.shared_head_head.weight"]


def is_head(name: str) -> bool:
    return name.startswith(HEAD)


@contextmanager
def engine_of(path: Path, **settings) -> Iterator[Pipeline]:
    """A loaded engine over the model at ``path``, with two threads unless told otherwise."""
    with GGUFFile.open(path) as file:
        engine = load_engine(Settings(**{"threads": 2, "context": 512, "batch": 4, **settings}), file)
        try:
            yield engine
        finally:
            engine.close()


@dataclass
class Talk:
    """One request: what it wants, what it has got, how its drafts fared. ``spoil`` may replace the drafts that it carries."""

    prompt: Tokens
    pages: Tokens
    sampling: Sampling = GREEDY
    count: int = 24
    limits: Sequence[DraftLimits] = (DraftLimits(3, 3),)
    spoil: Callable[[int, Tokens], Tokens] = lambda at, drafts: drafts
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    drafts: Tokens = ()
    sources: list[str] = field(default_factory=list)
    windows: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def left(self) -> int:
        return self.count - len(self.generated)

    def limit(self) -> DraftLimits:
        wanted = self.limits[self.windows % len(self.limits)]
        return DraftLimits(min(wanted.mtp, self.left), min(wanted.lookup, self.left))

    def take(self, segment: Segment, result: SegmentResult) -> None:
        assert not result.error
        self.windows += 1
        self.drafted += segment.num_drafts
        self.accepted += result.accepted
        self.generated += result.picks
        self.logprobs += result.logprobs
        self.drafts = self.spoil(len(self.generated), result.drafts)
        self.sources.append(result.draft_source)
        limit = segment.draft_limits.lookup if result.draft_source == "lookup" else segment.draft_limits.mtp
        assert len(result.drafts) <= limit


class Player:
    """Plays the slot machine for an engine: reads prompts in chunks, then decodes all talks together with the drafts they carry."""

    def __init__(self, engine: Pipeline) -> None:
        self.engine = engine
        self.events: queue.Queue = queue.Queue()
        self.windows: list[Window] = []
        self.done: list[WindowDone] = []
        engine.start(self.events.put)

    def run(self, kind: str, *segments: Segment) -> tuple[SegmentResult, ...]:
        window = Window(len(self.windows) + 1, kind, 0, segments)
        self.windows.append(window)
        self.engine.submit(window)
        event = self.events.get(timeout=300)
        assert isinstance(event, WindowDone) and event.window_id == window.id, event
        self.done.append(event)
        return event.results

    def read(self, slot: int, talk: Talk, start: int = 0, chunk: int = 128) -> None:
        """Read a talk's prompt, and what it has generated but the last token, from ``start`` on; pick where nothing is generated."""
        text = (*talk.prompt, *talk.generated[:-1])
        while start < len(text):
            stop = min(len(text), (start // chunk + 1) * chunk)
            picks = stop == len(text) and not talk.generated
            segment = Segment(
                f"r{id(talk)}", slot, start, text[start:stop], talk.pages, talk.sampling if picks else None,
                history=(talk.prompt, talk.generated), draft_limits=talk.limit() if picks else NO_DRAFTS,
            )
            result, = self.run("prompt", segment)
            if picks:
                talk.take(segment, result)
                talk.windows = 0
            start = stop

    def step(self, talks: Mapping[int, Talk]) -> None:
        """One decode window of these slots."""
        segments = []
        for slot, talk in talks.items():
            drafts = talk.drafts[:max(0, talk.left - 1)]
            start = len(talk.prompt) + len(talk.generated) - 1
            segments.append(Segment(
                f"r{id(talk)}", slot, start, (talk.generated[-1], *drafts), talk.pages, talk.sampling, len(drafts),
                (talk.prompt, talk.generated), draft_limits=talk.limit(),
            ))  # fmt: skip
        for segment, talk, result in zip(segments, talks.values(), self.run("decode", *segments)):
            talk.take(segment, result)

    def play(self, talks: Sequence[Talk]) -> None:
        """All talks to their ends, in slots 0 and on."""
        for slot, talk in enumerate(talks):
            self.read(slot, talk)
        while going := {slot: talk for slot, talk in enumerate(talks) if talk.left > 0}:
            self.step(going)


def pages_of(slot: int, tokens: int) -> Tokens:
    """The pages of a slot in these tests: 8 for each."""
    assert tokens <= 8 * PAGE
    return tuple(range(8 * slot, 8 * slot + 8))
