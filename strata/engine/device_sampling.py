"""Results of a window whose logits stay on the device: picks and logprobs are computed there, and a few numbers come back.

Windows that ask for prompt logprobs have too many rows of logits for the device to keep; the stage hands them over as arrays and the
CPU's sampler serves them, by the same rules. Buffers grow to the largest window and are then used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from strata.devices.base import Buffer, HostArray
from strata.engine import sampling
from strata.engine.device_stage import LogitsOnDevice
from strata.engine.kernel_ops import KernelOps
from strata.engine.results import NOT_FINITE, Sampler, picked_rows, segment_rows
from strata.kernels.sample import Choices, DeviceChoices, History, choices_of, logprobs, sample
from strata.messages import Segment, SegmentResult, TokenLogprob, Window

MAX_TOP = 20  # alternatives that a request can ask for


class DeviceSampler(Sampler):
    """``ops`` of the last stage: the sampler works on its stream, in its thread."""

    def __init__(self, ops: KernelOps) -> None:
        super().__init__()
        self._ops = ops
        self._room: dict[str, Buffer] = {}

    def __call__(self, window: Window, logits: np.ndarray | LogitsOnDevice) -> tuple[SegmentResult, ...]:
        if not isinstance(logits, LogitsOnDevice):
            return super().__call__(window, logits)
        asked = [(segment, row) for segment, _ in segment_rows(window) for row in picked_rows(segment)]
        picks = self._pick(logits.buffer, asked) if asked else np.empty(0, np.int32)
        reported = self._logprobs(logits.buffer, asked, picks)
        results, at = [], 0
        for segment in window.segments:
            stop = at + len(picked_rows(segment))
            results.append(device_result(segment, picks[at:stop].tolist(), reported[at:stop]))
            at = stop
        return tuple(results)

    def _pick(self, logits: Buffer, asked: Sequence[tuple[Segment, int]]) -> HostArray:
        """int32 [rows]: the token of each row, or ``BROKEN``."""
        rows = [self._row(segment, row) for segment, row in asked]
        choices = choices_of([(row.sampling, row.position, History(row.prompt.tolist(), row.generated)) for row in rows], logits.shape[1])
        picks = self._buffer("picks", (len(rows),), np.int32)
        scratch = self._buffer("scratch", logits.shape, np.float32)
        sample(self._ops.device, logits, scratch, self._send(choices), picks, self._ops.stream)
        return self._fetch(picks)

    def _send(self, choices: Choices) -> DeviceChoices:
        buffers = []
        for field in fields(choices):
            array = getattr(choices, field.name)
            buffer = self._buffer(field.name, array.shape, array.dtype)
            self._ops.device.upload(buffer, array, self._ops.stream)
            buffers.append(buffer)
        return DeviceChoices(*buffers)

    def _logprobs(self, logits: Buffer, asked: Sequence[tuple[Segment, int]], picks: HostArray) -> list[TokenLogprob | None]:
        """One for each row whose request asks for logprobs."""
        counts = [segment.sampling.logprobs if segment.sampling else -1 for segment, _ in asked]
        if max(counts, default=-1) < 0:
            return [None] * len(asked)
        shape = (len(asked), max(MAX_TOP, *counts))
        tokens, wanted = self._buffer("picks", picks.shape, np.int32), self._buffer("counts", picks.shape, np.int32)
        chosen, ids = self._buffer("chosen", picks.shape, np.float64), self._buffer("top_ids", shape, np.int32)
        tops = self._buffer("top_logprobs", shape, np.float64)
        self._ops.device.upload(wanted, np.maximum(counts, 0).astype(np.int32), self._ops.stream)
        logprobs(self._ops.device, logits, tokens, wanted, chosen, ids, tops, self._ops.stream)
        chosen_of, ids_of, tops_of = self._fetch(chosen).tolist(), self._fetch(ids).tolist(), self._fetch(tops).tolist()
        return [
            TokenLogprob(int(picks[row]), chosen_of[row], tuple(zip(ids_of[row][:count], tops_of[row][:count]))) if count >= 0 else None
            for row, count in enumerate(counts)
        ]

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Buffer:
        """The room of this name, made larger where this window needs more than any before."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if name not in self._room or self._room[name].nbytes < size:
            self._room[name] = self._ops.device.allocate((max(size, 8),), np.uint8)
        return self._room[name].view(shape, dtype)

    def _fetch(self, buffer: Buffer) -> HostArray:
        host: HostArray = np.empty(buffer.shape, buffer.dtype)
        self._ops.device.download(host, buffer, self._ops.stream)
        self._ops.stream.synchronize()
        return host


def device_result(segment: Segment, picks: list[int], reported: Sequence[TokenLogprob | None]) -> SegmentResult:
    """As results.result: picks up to the first draft that was not picked, an error where one of those rows is broken."""
    if segment.sampling is None:
        return SegmentResult()
    accepted = sampling.accepted(segment.tokens[len(segment.tokens) - segment.num_drafts :], picks)
    kept = tuple(picks[: accepted + 1])
    if sampling.BROKEN in kept:
        return SegmentResult(error=NOT_FINITE)
    return SegmentResult(kept, accepted, tuple(one for one in reported[: accepted + 1] if one is not None))
