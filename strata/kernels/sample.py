"""Picks and logprobs on the device (sample.cu): a window's tokens without its logits ever leaving it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from strata.devices.base import Buffer, Device, HostArray, KernelName, Launch, Stream
from strata.kernels.check import Shapes, int32
from strata.request import Sampling

PICK, DRAFT, LOGPROBS = (KernelName("sample", entry) for entry in ("sample<false>", "sample<true>", "logprobs"))
THREADS = 512
GREEDY_BELOW = 1e-5  # as the CPU's sampling: what cannot turn a choice but could overflow the division


@dataclass(frozen=True, slots=True)
class History:
    """What penalties must know of one row: ``prompt`` ids (any order, repeats allowed) and ``generated`` ones."""

    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Choices:
    """The requests of a window's rows, as arrays on the host or (``DeviceChoices``) buffers: see sample.cu for each."""

    real: HostArray
    ln_min_p: HostArray
    whole: HostArray
    penalties: HostArray
    first_entry: HostArray
    entry_ints: HostArray
    entry_bias: HostArray


@dataclass(frozen=True, slots=True)
class DeviceChoices:
    real: Buffer
    ln_min_p: Buffer
    whole: Buffer
    penalties: Buffer
    first_entry: Buffer
    entry_ints: Buffer
    entry_bias: Buffer


def choices_of(rows: Sequence[tuple[Sampling, int, History]], vocab: int) -> Choices:
    """Arrays for rows of (sampling, absolute position of the token drawn, history). Tokens outside the vocabulary are left out."""
    entries = [_entries(sampling, history, vocab) for sampling, _, history in rows]
    flat = [entry for one in entries for entry in one]
    samplings = [sampling for sampling, _, _ in rows]
    return Choices(
        real=np.array([(s.temperature if s.temperature >= GREEDY_BELOW else 0.0, s.top_p) for s in samplings], np.float64),
        ln_min_p=np.array([math.log(s.min_p) if s.min_p > 0 else -math.inf for s in samplings], np.float32),
        whole=np.array(
            [(s.seed & 0xFFFFFFFF, s.seed >> 32, s.choice, position, max(s.top_k, 0)) for s, position, _ in rows], np.uint32
        ),
        penalties=np.array([(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in samplings], np.float32),
        first_entry=np.concatenate([[0], np.cumsum([len(one) for one in entries])]).astype(np.int32),
        entry_ints=np.array([entry[:3] for entry in flat], np.int32).reshape(-1, 3),
        entry_bias=np.array([entry[3] for entry in flat], np.float32),
    )


def _entries(sampling: Sampling, history: History, vocab: int) -> list[tuple[int, int, int, float]]:
    """(token, times generated, seen, bias) of every token whose logit changes, ascending."""
    bias: dict[int, float] = {}
    for token, value in sampling.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    counts: dict[int, int] = {}
    seen: set[int] = set()
    if sampling.has_penalties:
        for token in history.generated:
            counts[token] = counts.get(token, 0) + 1
        seen = {*counts, *(history.prompt if sampling.repetition_penalty != 1.0 else ())}
    tokens = sorted(token for token in {*bias, *seen} if 0 <= token < vocab)
    return [(token, counts.get(token, 0), int(token in seen), bias.get(token, 0.0)) for token in tokens]


def put_choices(device: Device, choices: Choices, stream: Stream) -> DeviceChoices:
    """Fresh buffers of the arrays' sizes; returns when they are there."""
    buffers = []
    for field in fields(choices):
        array = getattr(choices, field.name)
        buffer = device.allocate(array.shape, array.dtype)
        device.upload(buffer, array, stream)
        buffers.append(buffer)
    stream.synchronize()
    return DeviceChoices(*buffers)


@dataclass(frozen=True, slots=True)
class DraftHead:
    """What a draft's pick has besides. ``vocabulary`` int32 [vocab]: the token of each logit; ``sure`` float32 [rows]: its probability."""

    vocabulary: Buffer
    sure: Buffer


def sample(
    device: Device, logits: Buffer, scratch: Buffer, choices: DeviceChoices, picks: Buffer, stream: Stream, draft: DraftHead | None = None
) -> None:
    """``picks`` int32 [rows] from ``logits`` float32 [rows, vocab], which stay; ``scratch`` of the same shape. -1: a broken row.

    With ``draft`` the entries of ``choices`` name places in its vocabulary, the picks are tokens, and their noise is the tokens' own.
    """
    shapes = Shapes("sample")
    shapes.match("logits", logits, np.float32, "rows", "vocab")
    shapes.match("scratch", scratch, np.float32, "rows", "vocab")
    shapes.match("real", choices.real, np.float64, "rows", 2)
    shapes.match("ln_min_p", choices.ln_min_p, np.float32, "rows")
    shapes.match("whole", choices.whole, np.uint32, "rows", 5)
    shapes.match("penalties", choices.penalties, np.float32, "rows", 3)
    shapes.match("first_entry", choices.first_entry, np.int32, shapes["rows"] + 1)
    shapes.match("entry_ints", choices.entry_ints, np.int32, "entries", 3)
    shapes.match("entry_bias", choices.entry_bias, np.float32, "entries")
    shapes.match("picks", picks, np.int32, "rows")
    if draft is not None:
        shapes.match("vocabulary", draft.vocabulary, np.int32, "vocab")
        shapes.match("sure", draft.sure, np.float32, "rows")
    vocabulary, sure = (picks, logits) if draft is None else (draft.vocabulary, draft.sure)
    requests = [getattr(choices, field.name) for field in fields(choices)]
    arguments = [logits, scratch, int32(shapes["vocab"]), *requests, vocabulary, picks, sure]
    device.launch(Launch(PICK if draft is None else DRAFT, (shapes["rows"], 1, 1), THREADS), arguments, stream)


def logprobs(
    device: Device, logits: Buffer, tokens: Buffer, counts: Buffer, results: tuple[Buffer, Buffer, Buffer], stream: Stream
) -> None:
    """Logprobs of raw ``logits`` at ``tokens`` (int32 [rows]), and the ``counts`` (int32 [rows]) best ones, into ``results``:
    of the tokens float64 [rows]; the best ids int32 and their logprobs float64, [rows, room] each."""
    chosen, top_ids, top_logprobs = results
    shapes = Shapes("logprobs")
    shapes.match("logits", logits, np.float32, "rows", "vocab")
    shapes.match("tokens", tokens, np.int32, "rows")
    shapes.match("counts", counts, np.int32, "rows")
    shapes.match("chosen", chosen, np.float64, "rows")
    shapes.match("top_ids", top_ids, np.int32, "rows", "room")
    shapes.match("top_logprobs", top_logprobs, np.float64, "rows", "room")
    arguments = [logits, int32(shapes["vocab"]), tokens, counts, int32(shapes["room"]), chosen, top_ids, top_logprobs]
    device.launch(Launch(LOGPROBS, (shapes["rows"], 1, 1), THREADS), arguments, stream)
