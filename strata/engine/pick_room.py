"""Where picks and logprobs of a window are made on a device: every buffer allocated once, requests sent and results read in one go.

One pinned buffer for each direction is enough: a window's picks are waited for before the next window's requests are written.
``MAX_ENTRIES`` bounds the tokens whose logits change (bias, penalties) in one window, ``MAX_TOP`` the alternatives a row can report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from strata.devices.base import Buffer, Device, HostArray, Stream
from strata.kernels.sample import Choices, DeviceChoices, logprobs, sample

MAX_TOP = 20
MAX_ENTRIES = 1 << 16
_ALIGN = 16
_Spans = dict[str, tuple[int, tuple[int, ...], np.dtype]]


def _spans(shapes: dict[str, tuple[tuple[int, ...], type]]) -> tuple[_Spans, int]:
    """name -> (first byte, shape, dtype) one after the other, and the bytes in all."""
    spans: _Spans = {}
    at = 0
    for name, (shape, dtype) in shapes.items():
        kind = np.dtype(dtype)
        spans[name] = (at, shape, kind)
        at += -(-math.prod(shape) * kind.itemsize // _ALIGN) * _ALIGN
    return spans, at


def request_spans(rows: int) -> tuple[_Spans, int]:
    """Where the fields of ``Choices`` lie for up to ``rows`` rows."""
    return _spans({
        "real": ((rows, 2), np.float64), "ln_min_p": ((rows,), np.float32), "whole": ((rows, 5), np.uint32),
        "penalties": ((rows, 3), np.float32), "first_entry": ((rows + 1,), np.int32), "counts": ((rows,), np.int32),
        "entry_ints": ((MAX_ENTRIES, 3), np.int32), "entry_bias": ((MAX_ENTRIES,), np.float32),
    })  # fmt: skip


def result_spans(rows: int) -> tuple[_Spans, int]:
    """Where picks and logprobs lie; the picks first, because most windows want no more."""
    return _spans({
        "picks": ((rows,), np.int32), "chosen": ((rows,), np.float64), "top_ids": ((rows, MAX_TOP), np.int32),
        "top_logprobs": ((rows, MAX_TOP), np.float64),
    })  # fmt: skip


class Requests:
    """What the picks of up to ``rows`` rows are to be drawn by, on its way to the device and there."""

    def __init__(self, device: Device, stream: Stream, rows: int) -> None:
        self._device, self._stream = device, stream
        self._spans, nbytes = request_spans(rows)
        self._sent, self._block = device.pinned((nbytes,), np.uint8), device.allocate((nbytes,), np.uint8)

    def send(self, choices: Choices, counts: Sequence[int]) -> None:
        """The rows' requests in one copy, and the entries there are in two."""
        for name in self._spans:
            value = np.maximum(counts, 0) if name == "counts" else getattr(choices, name)
            _host(self._sent, self._spans, name, len(value))[...] = value
        self._copy(0, self._spans["entry_ints"][0])
        for name in ("entry_ints", "entry_bias") if len(choices.entry_bias) else ():
            self._copy(self._spans[name][0], getattr(choices, name).nbytes)

    def _copy(self, first: int, nbytes: int) -> None:
        self._device.upload(self._block.view((nbytes,), np.uint8, first), self._sent[first : first + nbytes], self._stream)

    def part(self, name: str, rows: int) -> Buffer:
        return _part(self._block, self._spans, name, rows)

    def choices(self, rows: int, entries: int) -> DeviceChoices:
        """Where they are: always the same places, whatever they hold."""
        counts = {"first_entry": rows + 1, "entry_ints": entries, "entry_bias": entries}
        return DeviceChoices(*(self.part(field.name, counts.get(field.name, rows)) for field in fields(DeviceChoices)))


class PickRoom:
    """For windows of up to ``rows`` picks among ``vocab`` tokens, on ``stream``."""

    def __init__(self, device: Device, stream: Stream, rows: int, vocab: int) -> None:
        self._device, self._stream = device, stream
        self._requests = Requests(device, stream, rows)
        self._results, result_bytes = result_spans(rows)
        self._got = device.pinned((result_bytes,), np.uint8)
        self._result_block = device.allocate((result_bytes,), np.uint8)
        self._scratch = device.allocate((rows, vocab), np.float32)

    def run(self, logits: Buffer, choices: Choices, counts: Sequence[int]) -> dict[str, HostArray]:
        """``picks`` int32 [rows]; with any of ``counts`` (alternatives wanted, -1: no logprob) from 0 on also ``chosen`` float64 [rows],
        ``top_ids`` int32 and ``top_logprobs`` float64 [rows, MAX_TOP]. Waits. What is returned holds until the next window."""
        rows = len(counts)
        results = {name: _part(self._result_block, self._results, name, rows) for name in self._results}
        self._requests.send(choices, counts)
        requests = self._requests.choices(rows, len(choices.entry_bias))
        sample(self._device, logits, self._scratch.rows(0, rows), requests, results["picks"], self._stream)
        wanted = ["picks"]
        if max(counts) >= 0:
            wanted = list(results)
            picks, *outputs = results.values()
            alternatives = self._requests.part("counts", rows)
            logprobs(self._device, logits, picks, alternatives, (outputs[0], outputs[1], outputs[2]), self._stream)
        arrays = {name: _host(self._got, self._results, name, rows) for name in wanted}
        for name, array in arrays.items():
            self._device.download(array, results[name], self._stream)
        self._stream.synchronize()
        return arrays


def _part(block: Buffer, spans: _Spans, name: str, rows: int) -> Buffer:
    first, shape, dtype = spans[name]
    return block.view((rows, *shape[1:]), dtype, first)


def _host(block: HostArray, spans: _Spans, name: str, rows: int) -> HostArray:
    first, shape, dtype = spans[name]
    nbytes = rows * math.prod(shape[1:]) * dtype.itemsize
    return block[first : first + nbytes].view(dtype).reshape(rows, *shape[1:])
