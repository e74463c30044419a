"""A stage on a device: windows in, hidden rows or logits out; decode by captured graphs, prompts by plain launches.

A decode window is padded to buckets (graphs.py). Pad rows write to a page of their own, which no table names. Buckets size grids and
choose graphs; no row's bits depend on them. Nothing is allocated while windows run, and nothing waits but what reads a window's result.
Between stages rows go through hop.py; ``connect`` joins the stages of an engine before their first window.

Why its own sequence beside forward.py: what is one step of the text there is half a kernel here. The residual sum waits for the next norm,
which also quantises; SwiGLU ends a product; the shared expert begins the sum of the others; logits of a prompt come in lots. A text for
both would have to be written in these fused verbs, and would no longer say what a layer is. The layers' weights have the same names in
both, and tests compare the two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.devices.base import Buffer, Graph, HostArray
from strata.engine.device_space import HEAD_ROWS
from strata.engine.draft import Source
from strata.engine.graphs import GraphCache, context_bucket, num_graphs, row_bucket
from strata.engine.hop import Hop, Parcel, fault_of
from strata.engine.kernel_ops import KernelOps
from strata.engine.kernel_weights import DeviceLayer
from strata.engine.rope import Rope
from strata.engine.rows import wanted_rows
from strata.engine.window_upload import Fields, WindowRows, WindowSender, widest
from strata.kernels.tensors import Matrix
from strata.messages import EngineFacts, Tokens, Window

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StageWeights:
    """A stage's layers; ``embedding`` on the first stage; ``output`` (last norm, output matrix) on the last."""

    layers: tuple[DeviceLayer, ...]
    embedding: Matrix | None
    output: tuple[Buffer, Matrix] | None


@dataclass(frozen=True, slots=True)
class LogitsOnDevice:
    """A window's logits where the device keeps them until the next window: float32 [wanted rows, vocabulary]."""

    buffer: Buffer


class DeviceStage:
    """Implements stage.StageModel over ``ops``; ``facts`` sizes what is sent. All memory is allocated here or before."""

    def __init__(self, ops: KernelOps, weights: StageWeights, rope: Rope, facts: EngineFacts) -> None:
        self.ops, self.weights, self._rope, self._facts = ops, weights, rope, facts
        self._pairs = len(rope.frequencies)
        self._sender = WindowSender(ops.device, ops.stream, widest(facts.chunk, facts.context, facts.page_tokens, self._pairs))
        self.graphs = GraphCache(num_graphs(facts.max_rows, facts.context))
        self.outbound: Hop | None = None
        self._begun, self._ended = ops.device.timed_event(), ops.device.timed_event()
        self._last: Parcel | None = None
        self.mtp: Source | None = None  # who drafts behind the last stage, and the hidden row of each page that it needs
        self.page_hidden: Buffer | None = None

    def forward(self, window: Window, arrived: Parcel | None) -> Parcel | Floats | LogitsOnDevice:
        """A parcel for the next stage, or on the last one logits: on the device, or an array for prompt logprobs."""
        count = sum(len(segment.tokens) for segment in window.segments)
        parcel = self._begin(arrived)
        result = self._decode(window, count) if window.kind == "decode" else self._prompt(window, count)
        if parcel is not None:
            parcel.hop.send(parcel, self.ops.space.hidden.rows(0, count), self.ops.stream)
            return parcel
        assert result is not None
        return result

    def _begin(self, arrived: Parcel | None) -> Parcel | None:
        """Rows in; the time from here on is this stage's. The parcel for what goes out, None on the last stage."""
        stream = self.ops.stream
        if arrived is not None:
            stream.wait(arrived.place.filled)
        parcel = None if self.outbound is None else self.outbound.begin(stream)
        if parcel is None:
            stream.record(self._begun)
        if arrived is not None:
            arrived.hop.receive(arrived, self.ops.space.hidden, stream)
        self._last = parcel
        return parcel

    def timer(self) -> Callable[[], float]:
        """See stage.DeviceModel."""
        return self._wait_for_end if self._last is None else self._last.seconds

    def _wait_for_end(self) -> float:
        self.ops.stream.record(self._ended)
        self._ended.synchronize()
        return self.ops.device.seconds_between(self._begun, self._ended)

    def check(self) -> None:
        """See stage.DeviceModel."""
        self.ops.stream.synchronize()

    def _send(self, window: Window, fields: Fields, context: int) -> WindowRows:
        self._sender.send(window, fields, self._rope, scratch_page=self.ops.pages.data.shape[0] - 1)
        return self._sender.rows(fields, context)

    def _decode(self, window: Window, count: int) -> LogitsOnDevice | None:
        rows = row_bucket(count)
        context = context_bucket(max(segment.end for segment in window.segments), self._facts.context)
        window_rows = self._send(window, Fields(rows, rows, -(-context // self._facts.page_tokens), self._pairs), context)
        self.graphs.get((rows, context), lambda: self._capture(window_rows)).replay(self.ops.stream)
        return self._kept_logits(len(wanted_rows(window)))

    def _capture(self, rows: WindowRows) -> Graph:
        """The graph of this pair of buckets; its head computes logits for every row."""
        with self.ops.device.capture(self.ops.stream) as graph:
            self._layers(rows)
            if self.weights.output is not None:
                self.ops.logits(rows.wanted, *self.weights.output)
        return graph

    def _prompt(self, window: Window, count: int) -> Floats | LogitsOnDevice | None:
        length = max(segment.end for segment in window.segments)
        rows = self._send(window, Fields(count, len(window.segments), -(-length // self._facts.page_tokens), self._pairs), 0)
        self._layers(rows)
        if self.weights.output is None:
            return None
        kept = self.ops.kept is not None
        if kept:
            self.ops.keep(count, self.weights.output[0])
        num_wanted = len(wanted_rows(window))
        if all(segment.prompt_logprobs < 0 for segment in window.segments):
            if num_wanted:
                self.ops.logits(rows.wanted.rows(0, num_wanted), *self.weights.output, add=not kept)
            return self._kept_logits(num_wanted)
        pieces = []
        for start in range(0, num_wanted, HEAD_ROWS):
            wanted = rows.wanted.rows(start, min(start + HEAD_ROWS, num_wanted))
            pieces.append(self._download(self.ops.logits(wanted, *self.weights.output, add=not kept)))
        return np.concatenate(pieces)

    def _kept_logits(self, count: int) -> LogitsOnDevice | None:
        logits = self.ops.space.logits
        return None if logits is None else LogitsOnDevice(logits.rows(0, count))

    def _layers(self, rows: WindowRows) -> None:
        if self.weights.embedding is not None:
            self.ops.embed(rows, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            self.ops.block(index, layer, rows, add=index > 0)
        if self.weights.output is None:
            self.ops.finish(rows)

    def _download(self, buffer: Buffer) -> Floats:
        host = np.empty(buffer.shape, np.float32)
        self.ops.device.download(host, buffer, self.ops.stream)
        self.ops.stream.synchronize()
        return host

    def copy_out(self, pages: Tokens) -> HostArray:
        """A host image of whole pages: int8 [pages, bytes], hidden rows behind keys and values."""
        parts = self._parts_of_page()
        image: HostArray = np.empty((len(pages), sum(part.shape[1] for part in parts)), np.int8)
        for line, page in zip(image, pages):
            for part, piece in zip(parts, pieces(line, parts)):
                self.ops.device.download(piece, part.rows(page, page + 1), self.ops.stream)
        self.ops.stream.synchronize()
        return image

    def _parts_of_page(self) -> list[Buffer]:
        """int8 [pages, bytes] each."""
        hidden = self.page_hidden
        whole = [] if hidden is None else [hidden.view((hidden.shape[0], 4 * hidden.shape[1]), np.int8)]
        return [self.ops.pages.data, *whole]

    def copy_in(self, image: Any, pages: Tokens) -> None:
        """Write an image's first pages back, to these pages. Raises ValueError if it has fewer."""
        if len(image) < len(pages):
            raise ValueError(f"an image of {len(image)} pages does not fill {len(pages)} pages")
        parts = self._parts_of_page()
        for line, page in zip(image, pages):
            for part, piece in zip(parts, pieces(line, parts)):
                self.ops.device.upload(part.rows(page, page + 1), piece, self.ops.stream)
        self.ops.stream.synchronize()


def pieces(line: HostArray, parts: Sequence[Buffer]) -> list[HostArray]:
    """A page's line of an image, cut as its parts are: [1, bytes] each."""
    edges = [0, *accumulate(part.shape[1] for part in parts)]
    return [line[np.newaxis, first:end] for first, end in zip(edges, edges[1:])]


def connect(stages: Sequence[DeviceStage], peer_copy: bool = False) -> None:
    """Hops between neighbours; with ``peer_copy`` direct ones where a test at this moment gets every byte across."""
    for number, (sender, receiver) in enumerate(zip(stages, stages[1:])):
        source, target, hidden = sender.ops.device, receiver.ops.device, sender.ops.space.hidden
        fault = fault_of(source, target, hidden.nbytes) if peer_copy else "peer_copy is off"
        way = f"by way of host memory ({fault})" if fault else "directly"
        log.log(logging.WARNING if peer_copy and fault else logging.INFO, "rows go from stage %d to stage %d %s", number, number + 1, way)
        sender.outbound = Hop(source, target, (hidden.shape[0], hidden.shape[1]), direct=not fault)
