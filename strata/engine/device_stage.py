"""A stage on a device: windows in, hidden rows or logits out; decode by captured graphs, prompts by plain launches.

A decode window is padded to buckets (graphs.py). Pad rows write to a page of their own, which no table names. Buckets size grids and
choose graphs; no row's bits depend on them. Nothing is allocated while windows run, and nothing waits but what reads a window's result.
Between stages rows go through hop.py; ``connect`` joins the stages of an engine before their first window.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.devices.base import Buffer, Device, Graph, HostArray, Stream
from strata.engine.families import ModelConfig
from strata.engine.graphs import ROW_BUCKETS, GraphCache, context_bucket, num_graphs, row_bucket, row_buckets
from strata.engine.hop import Hop, Parcel, fault_of
from strata.engine.kernel_ops import HEAD_ROWS, KernelOps, WindowSizes, Workspace, kernels_of
from strata.engine.kernel_weights import DeviceLayer, WeightLoader
from strata.engine.rope import Rope
from strata.engine.rows import wanted_rows
from strata.engine.window_upload import Fields, WindowRows, WindowSender
from strata.errors import ModelError
from strata.kernels.attention import SPLIT
from strata.kernels.pages import Pages, PageShape, scale_group
from strata.kernels.tensors import Matrix
from strata.messages import EngineFacts, Tokens, Window
from strata.weights.gguf import GGUFFile

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
        pages = -(-(facts.context + 1) // facts.page_tokens)
        widest = Fields(max(ROW_BUCKETS[-1], facts.chunk), ROW_BUCKETS[-1], pages + SPLIT // facts.page_tokens, self._pairs)
        self._sender = WindowSender(ops.device, ops.stream, widest.words)
        self.graphs = GraphCache(num_graphs(facts.max_rows, facts.context))
        self.outbound: Hop | None = None
        self._begun, self._ended = ops.device.timed_event(), ops.device.timed_event()
        self._last: Parcel | None = None

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
        return LogitsOnDevice(self.ops.space.logits.rows(0, len(wanted_rows(window)))) if self.weights.output else None

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
        num_wanted = len(wanted_rows(window))
        if all(segment.prompt_logprobs < 0 for segment in window.segments):
            logits = self.ops.space.logits.rows(0, num_wanted)
            if num_wanted:
                self.ops.logits(rows.wanted.rows(0, num_wanted), *self.weights.output)
            return LogitsOnDevice(logits)
        pieces = []
        for start in range(0, num_wanted, HEAD_ROWS):
            wanted = rows.wanted.rows(start, min(start + HEAD_ROWS, num_wanted))
            pieces.append(self._download(self.ops.logits(wanted, *self.weights.output)))
        return np.concatenate(pieces)

    def _layers(self, rows: WindowRows) -> None:
        if self.weights.embedding is not None:
            self.ops.embed(rows, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            self.ops.block(index, layer, rows)
        if self.weights.output is None:
            self.ops.finish(rows)

    def _download(self, buffer: Buffer) -> Floats:
        host = np.empty(buffer.shape, np.float32)
        self.ops.device.download(host, buffer, self.ops.stream)
        self.ops.stream.synchronize()
        return host

    def copy_out(self, pages: Tokens) -> HostArray:
        """A host image of whole pages: int8 [pages, page_bytes]."""
        pool = self.ops.pages.data
        image: HostArray = np.empty((len(pages), pool.shape[1]), np.int8)
        for line, page in zip(image, pages):
            self.ops.device.download(line[np.newaxis], pool.rows(page, page + 1), self.ops.stream)
        self.ops.stream.synchronize()
        return image

    def copy_in(self, image: Any, pages: Tokens) -> None:
        """Write an image's first pages back, to these pages. Raises ValueError if it has fewer."""
        if len(image) < len(pages):
            raise ValueError(f"an image of {len(image)} pages does not fill {len(pages)} pages")
        for line, page in zip(image, pages):
            self.ops.device.upload(self.ops.pages.data.rows(page, page + 1), line[np.newaxis], self.ops.stream)
        self.ops.stream.synchronize()


def load_device_stage(
    device: Device, file: GGUFFile, config: ModelConfig, span: range, facts: EngineFacts, packed: bool = False, kv: str = "int8"
) -> DeviceStage:
    """Layers ``span`` of a model on ``device``, its kernels compiled; ``packed`` as for WeightLoader, ``kv`` as PageShape.kind.

    Raises DeviceError for what does not fit or compile, ModelError for heads that the kernels cannot hold.
    """
    try:
        scale_group(config.head_dim)
    except ValueError as error:
        raise ModelError(f"{file.path}: {error}; use --device cpu") from error
    stream = device.stream()
    loader = WeightLoader(file, config, device, stream, packed)
    rope = Rope(config.rope, loader.optional("rope_freqs.weight"))
    return build_stage(config, load_weights(loader, config, span), rope, facts, device, stream, kv)


def build_stage(
    config: ModelConfig, weights: StageWeights, rope: Rope, facts: EngineFacts, device: Device, stream: Stream, kv: str = "int8"
) -> DeviceStage:
    """A stage around weights that are on ``device``: its pages, its work space, its kernels compiled."""
    shape = PageShape(len(weights.layers), config.num_kv_heads, config.head_dim, facts.page_tokens, kv)
    pages = Pages(shape, device.allocate((facts.num_pages + 1, shape.page_bytes), np.int8))
    sizes = WindowSizes(max(ROW_BUCKETS[-1], facts.chunk), row_bucket(facts.max_rows), facts.context)
    space = Workspace(device, config, pages, sizes, stream)
    ends = [matrix for matrix in (weights.embedding, weights.output[1] if weights.output else None) if matrix is not None]
    counts = sorted({*row_buckets(facts.max_rows), facts.chunk})
    seconds = device.compile(list(kernels_of(config, shape, weights.layers, ends, counts)))
    log.info("kernels for %s: %.1f s to compile, or to find in the cache", device.info.name, seconds)
    return DeviceStage(KernelOps(device, config, pages, space, stream), weights, rope, facts)


def connect(stages: Sequence[DeviceStage], peer_copy: bool = False) -> None:
    """Hops between neighbours; with ``peer_copy`` direct ones where a test at this moment gets every byte across."""
    for number, (sender, receiver) in enumerate(zip(stages, stages[1:])):
        source, target, hidden = sender.ops.device, receiver.ops.device, sender.ops.space.hidden
        fault = fault_of(source, target, hidden.nbytes) if peer_copy else "peer_copy is off"
        way = f"by way of host memory ({fault})" if fault else "directly"
        log.log(logging.WARNING if peer_copy and fault else logging.INFO, "rows go from stage %d to stage %d %s", number, number + 1, way)
        sender.outbound = Hop(source, target, (hidden.shape[0], hidden.shape[1]), direct=not fault)


def load_weights(loader: WeightLoader, config: ModelConfig, span: range) -> StageWeights:
    """The weights of layers ``span``, with the ends of the model where the span has them. A tied matrix is taken once."""
    is_first, is_last = span.start == 0, span.stop == config.num_layers
    embedding = loader.matrix("token_embd.weight") if is_first or (is_last and config.tied) else None
    output = None
    if is_last:
        head = embedding if config.tied and embedding is not None else loader.matrix("output.weight")
        output = (loader.norm("output_norm.weight"), head)
    return StageWeights(tuple(loader.layer(index) for index in span), embedding if is_first else None, output)
