"""Results of a window whose logits stay on the device: picks and logprobs are computed there, and a few numbers come back.

Two kinds of windows are the CPU sampler's, by the same rules, to keep the device's buffers small: those that ask for prompt logprobs
(too many rows of logits for the device to keep, the stage hands over arrays), and those whose penalties touch more tokens than fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.devices.base import HostArray
from strata.engine import sampling
from strata.engine.device_space import HEAD_ROWS
from strata.engine.device_stage import LogitsOnDevice
from strata.engine.kernel_ops import KernelOps
from strata.engine.pick_room import MAX_ENTRIES, MAX_TOP, PickRoom
from strata.engine.results import NOT_FINITE, Sampler, picked_rows, segment_rows
from strata.kernels.sample import Choices, History, choices_of
from strata.messages import Segment, SegmentResult, TokenLogprob, Window


class DeviceSampler(Sampler):
    """``ops`` of the last stage: the sampler works on its stream, in its thread. Its memory is allocated here."""

    def __init__(self, ops: KernelOps) -> None:
        super().__init__()
        self._ops = ops
        self._room = PickRoom(ops.device, ops.stream, HEAD_ROWS, ops.config.vocab_size)

    def __call__(self, window: Window, logits: np.ndarray | LogitsOnDevice) -> tuple[SegmentResult, ...]:
        if not isinstance(logits, LogitsOnDevice):
            return super().__call__(window, logits)
        asked = [(segment, row) for segment, _ in segment_rows(window) for row in picked_rows(segment)]
        if not asked:
            return tuple(SegmentResult() for _ in window.segments)
        counts = [segment.sampling.logprobs if segment.sampling else -1 for segment, _ in asked]
        choices = self._choices(asked)
        if len(choices.entry_bias) > MAX_ENTRIES or max(counts) > MAX_TOP:
            return super().__call__(window, self._fetch(logits))
        found = self._room.run(logits.buffer, choices, counts)
        picks, reported = found["picks"].tolist(), token_logprobs(found, counts)
        results, at = [], 0
        for segment in window.segments:
            stop = at + len(picked_rows(segment))
            results.append(device_result(segment, picks[at:stop], reported[at:stop]))
            at = stop
        return tuple(results)

    def _choices(self, asked: Sequence[tuple[Segment, int]]) -> Choices:
        rows = [self._row(segment, row) for segment, row in asked]
        requests = [(row.sampling, row.position, History(row.prompt.tolist(), row.generated)) for row in rows]
        return choices_of(requests, self._ops.config.vocab_size)

    def _fetch(self, logits: LogitsOnDevice) -> HostArray:
        host: HostArray = np.empty(logits.buffer.shape, np.float32)
        self._ops.device.download(host, logits.buffer, self._ops.stream)
        self._ops.stream.synchronize()
        return host


def token_logprobs(found: dict[str, HostArray], counts: Sequence[int]) -> list[TokenLogprob | None]:
    """One for each row whose request asks for logprobs."""
    if "chosen" not in found:
        return [None] * len(counts)
    picks, chosen, ids, tops = (found[name].tolist() for name in ("picks", "chosen", "top_ids", "top_logprobs"))
    return [
        TokenLogprob(picks[row], chosen[row], tuple(zip(ids[row][:count], tops[row][:count]))) if count >= 0 else None
        for row, count in enumerate(counts)
    ]


def device_result(segment: Segment, picks: list[int], reported: Sequence[TokenLogprob | None]) -> SegmentResult:
    """As results.result: picks up to the first draft that was not picked, an error where one of those rows is broken."""
    if segment.sampling is None:
        return SegmentResult()
    accepted = sampling.accepted(segment.tokens[len(segment.tokens) - segment.num_drafts :], picks)
    kept = tuple(picks[: accepted + 1])
    if sampling.BROKEN in kept:
        return SegmentResult(error=NOT_FINITE)
    return SegmentResult(kept, accepted, tuple(one for one in reported[: accepted + 1] if one is not None))
