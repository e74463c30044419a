"""Hidden rows between the stages' devices, by way of host memory: pinned buffers, so that copies are asynchronous and nothing is allocated.

In: two pinned buffers take turns, each written again only when its last copy has passed. Out: one pinned buffer, read when the copy is
done; the rows handed on are the host's own, because the next stage may still read them when this one runs its next window.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata.devices.base import Buffer, Device, Stream

BUFFERS = 2


class HiddenPort:
    """Rows to and from ``hidden`` float32 [rows, width] of ``device``, on ``stream``."""

    def __init__(self, device: Device, stream: Stream, hidden: Buffer) -> None:
        self._device, self._stream, self._hidden = device, stream, hidden
        self._ring = [(device.pinned(hidden.shape, np.float32), device.event()) for _ in range(BUFFERS)]
        self._out = device.pinned(hidden.shape, np.float32)
        self._turn = 0

    def send(self, rows: NDArray[np.float32]) -> None:
        """Enqueues the copy of ``rows`` to the first rows; they can be changed at once."""
        host, event = self._ring[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        event.synchronize()
        host[: len(rows)] = rows
        self._device.upload(self._hidden.rows(0, len(rows)), host[: len(rows)], self._stream)
        self._stream.record(event)

    def fetch(self, count: int) -> NDArray[np.float32]:
        """The first ``count`` rows, when everything before is done."""
        host = self._out[:count]
        self._device.download(host, self._hidden.rows(0, count), self._stream)
        self._stream.synchronize()
        return host.copy()
