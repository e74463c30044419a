"""A few threads of our own that share the pieces of one operation; the caller is one of them.

NumPy releases the GIL inside its loops, so threads that multiply different pieces run side by side. Pieces are claimed one by one, not
dealt out: a thread that wakes late, or loses its core to another program, takes fewer, and nobody waits for a thread that has
claimed nothing. What a piece computes must not depend on who computes it.

BLAS is held to one thread while any ``Threads`` lives: its own threads beside ours would fight for the same cores, and its results would
depend on their number.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import threadpoolctl

from strata.engine.gate import GRACE, Gate


def usable_cores() -> int:
    """Processors that this process may use (affinity respected where the system tells it)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class _Job:
    """One operation: ``claims`` hands each piece to whoever asks next (one step of an iterator is atomic under the GIL)."""

    __slots__ = ("work", "pieces", "claims", "finished", "errors")

    def __init__(self, work: Callable[[int], object], pieces: int) -> None:
        self.work, self.pieces = work, pieces
        self.claims: Iterator[int] = iter(range(pieces))
        self.finished: list[int] = []
        self.errors: list[BaseException] = []

    def take(self) -> bool:
        """Do pieces until none is left; whether there was one. An error ends the taking and is kept for the caller."""
        done = 0
        try:
            for piece in self.claims:
                done += 1
                self.work(piece)
        except BaseException as error:
            self.errors.append(error)
        if done:
            self.finished.append(done)
        return bool(done)


_NOTHING = _Job(lambda piece: None, 0)


class _Worker:
    """One thread, which takes part in whatever job it finds when its gate opens. ``done`` is the caller's gate."""

    def __init__(self, index: int, done: Gate) -> None:
        self.go, self.done = Gate(GRACE + 96 * (index - 1)), done
        self.job: _Job | None = _NOTHING
        threading.Thread(target=self._serve, name=f"strata-ops-{index}", daemon=True).start()

    def start(self, job: _Job | None) -> None:
        """Take part in ``job``; None ends the thread."""
        self.job = job
        self.go.open()

    def _serve(self) -> None:
        # What a damaged row computes is its request's error, found in its logits; warnings belong to the caller's thread only.
        np.seterr(all="ignore")
        while True:
            self.go.wait()
            if self.job is None:
                return
            if self.job.take():
                self.done.open()


class Threads:
    """``count`` threads, the caller included. One caller at a time. ``close`` ends them; it may be called twice."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._done = Gate()
        self._closed = False
        _BLAS.hold()
        self._workers = [_Worker(index, self._done) for index in range(1, count)]

    def run(self, work: Callable[[int], object], pieces: int | None = None) -> None:
        """Call ``work(0) .. work(pieces - 1)``, each once, in any thread and order, and wait for all; without ``pieces``, one per thread.

        Raises the first error that a piece raised, once all have ended.
        """
        pieces = self.count if pieces is None else pieces
        if self.count == 1 or pieces < 2:
            for piece in range(pieces):
                work(piece)
            return
        job = _Job(work, pieces)
        for worker in self._workers[: pieces - 1]:
            worker.start(job)
        job.take()
        if job.errors:
            job.finished.append(sum(1 for _ in job.claims))
        while sum(job.finished) < pieces:
            self._done.wait()
        for worker in self._workers:
            worker.job = _NOTHING
        if job.errors:
            raise job.errors[0]

    def close(self) -> None:
        """End the threads; BLAS gets its own back when no other ``Threads`` is left."""
        if not self._closed:
            self._closed = True
            for worker in self._workers:
                worker.start(None)
            _BLAS.release()


class _OneBlasThread:
    """Limits BLAS while at least one holder lives. The limit is the process's, so the count of holders is too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0

    def hold(self) -> None:
        with self._lock:
            if not self._holders:
                self._libraries = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
                self._before = [library.num_threads for library in self._libraries]
                self._set([1] * len(self._libraries))
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._set(self._before)

    def _set(self, counts: list[int]) -> None:
        """From any thread. A newer threadpoolctl (3.8) hears only the first thread that ever set a limit, while it lives, and ignores
        others silently; models are loaded and closed on whatever thread a host program has for it."""
        forget = getattr(threadpoolctl.OpenBLASController, "clear_controlling_thread", lambda force: None)
        for library, count in zip(self._libraries, counts, strict=True):
            forget(force=True)
            library.set_num_threads(count)
        forget(force=True)


_BLAS = _OneBlasThread()
