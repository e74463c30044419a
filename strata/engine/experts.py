"""The experts of a model's blocks: as the file stores them, and decoded while there is room.

Decoding an expert takes some twenty times as long as multiplying it by a row, so all are decoded at load where that fits. Where it does
not, they stay mapped and quantised, and the experts used last are kept decoded, up to a number of bytes; a window that needs more at
once takes them in lots. What is kept changes no bit: an expert is the same each time it is decoded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from strata.engine.products import Arena, Floats, row_block
from strata.engine.threads import Threads
from strata.weights.formats import dequantize_blocks
from strata.weights.gguf import Tensor


def padded(rows: int, columns: int) -> int:
    """Rows of a matrix in whole blocks."""
    block = row_block(rows, columns)
    return -(-rows // block) * block


def expert_floats(width: int, inner: int) -> int:
    """Float32 numbers that one decoded expert takes."""
    return padded(2 * inner, width) * width + padded(width, inner) * inner


class Expert:
    """Room for one expert's weights in blocks: ``gate_up`` [blocks, 1, rows, width], the gate's rows first, ``down`` [.., inner]."""

    def __init__(self, width: int, inner: int, arena: Arena) -> None:
        self.width, self.inner = width, inner
        self.gate_up, self.down = self._blocks(2 * inner, width, arena), self._blocks(width, inner, arena)

    @staticmethod
    def _blocks(rows: int, columns: int, arena: Arena) -> Floats:
        whole = arena.take(padded(rows, columns), columns)
        whole[rows:] = 0
        return whole.reshape(-1, 1, row_block(rows, columns), columns)

    def parts(self) -> tuple[Floats, Floats, Floats]:
        """Where gate, up and down are decoded to, flat."""
        gate_up, size = self.gate_up.reshape(-1), self.inner * self.width
        return gate_up[:size], gate_up[size : 2 * size], self.down.reshape(-1)[:size]


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The experts of one block as the file has them: gate, up and down, each [count, rows, columns]; ``index`` among such blocks."""

    index: int
    tensors: tuple[Tensor, Tensor, Tensor]

    @property
    def count(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def inner(self) -> int:
        return self.tensors[0].shape[1]

    @property
    def width(self) -> int:
        return self.tensors[0].shape[2]

    @property
    def down_rows(self) -> int:
        """Rows of the third matrix in whole blocks."""
        return padded(self.width, self.inner)

    def decode(self, expert: int, which: int, out: Floats) -> None:
        """One of the three matrices of an expert."""
        tensor = self.tensors[which]
        size = tensor.data.size // self.count
        dequantize_blocks(tensor.type, tensor.data[expert * size : (expert + 1) * size], out)


class ExpertStore:
    """Decoded experts of one stage's blocks, all of one shape. Used by the stage's thread alone.

    ``limit`` bytes of float32 at most, but room for one expert; None: every block's experts are decoded when it is added.
    """

    def __init__(self, threads: Threads, arena: Arena, limit: int | None = None) -> None:
        self.limit, self.decoded = limit, 0
        self._threads, self._arena = threads, arena
        self._layers, self._room = 0, 0
        self._held: OrderedDict[tuple[int, int], Expert] = OrderedDict()

    def add(self, gate: Tensor, up: Tensor, down: Tensor) -> LayerExperts:
        """One more block."""
        layer = LayerExperts(self._layers, (gate, up, down))
        self._layers += 1
        self._room += layer.count
        if self.limit is None:
            self._take(layer, range(layer.count))
        else:
            self._room = min(self._room, max(1, self.limit // (4 * expert_floats(layer.width, layer.inner))))
        return layer

    def lots(self, layer: LayerExperts, wanted: Sequence[int]) -> Iterator[list[Expert]]:
        """These experts of a block, in order, decoded, as many at once as may be held; each lot is good until the next is taken."""
        for start in range(0, len(wanted), self._room):
            yield self._take(layer, wanted[start : start + self._room])

    def _take(self, layer: LayerExperts, wanted: Sequence[int]) -> list[Expert]:
        keys = [(layer.index, expert) for expert in wanted]
        missing = []
        for key in keys:
            if key in self._held:
                self._held.move_to_end(key)
            else:
                missing.append(key)
        if missing:
            self._held.update(zip(missing, self._decoded(layer, [expert for _, expert in missing])))
        return [self._held[key] for key in keys]

    def _decoded(self, layer: LayerExperts, experts: Sequence[int]) -> list[Expert]:
        """These experts, in the rooms of those not used for longest where there is no other."""
        rooms = []
        for new in range(1, len(experts) + 1):
            full = len(self._held) + new > self._room
            rooms.append(self._held.popitem(last=False)[1] if full else Expert(layer.width, layer.inner, self._arena))
        jobs = [(expert, which, out) for expert, room in zip(experts, rooms) for which, out in enumerate(room.parts())]
        self._threads.run(lambda piece: layer.decode(*jobs[piece]), len(jobs))
        self.decoded += len(experts)
        return rooms
