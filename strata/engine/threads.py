"""A few threads of our own that share the work of one operation; the caller is one of them.

NumPy releases the GIL inside its loops, so threads that multiply different blocks run side by side. BLAS is held to one thread
while we live: its own threads beside ours would fight for the same cores, and its results would depend on their number.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from threadpoolctl import threadpool_limits


def usable_cores() -> int:
    """Processors that this process may use (affinity respected where the system tells it)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class _Worker:
    """One thread, woken by a lock for each share of work."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.wake, self.done = threading.Lock(), threading.Lock()
        self.wake.acquire()
        self.done.acquire()
        self.work: Callable[[int], None] | None = None
        self.error: BaseException | None = None
        threading.Thread(target=self._serve, name=f"strata-ops-{index}", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.wake.acquire()
            if self.work is None:
                return
            try:
                self.work(self.index)
            except BaseException as error:
                self.error = error
            self.done.release()


class Threads:
    """``count`` threads, the caller included. One caller at a time. ``close`` ends them and gives BLAS its threads back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._blas = threadpool_limits(1, user_api="blas")
        self._workers = [_Worker(index) for index in range(1, count)]

    def run(self, work: Callable[[int], None]) -> None:
        """Call ``work(0) .. work(count - 1)``, one in each thread, and wait for all. Raises what the first of them raised."""
        for worker in self._workers:
            worker.work = work
            worker.wake.release()
        try:
            work(0)
        finally:
            for worker in self._workers:
                worker.done.acquire()
        for worker in self._workers:
            if worker.error is not None:
                error, worker.error = worker.error, None
                raise error

    def close(self) -> None:
        for worker in self._workers:
            worker.work = None
            worker.wake.release()
        self._workers = []
        self._blas.restore_original_limits()


def share(items: int, index: int, count: int) -> tuple[int, int]:
    """The part (start, stop) of ``items`` that thread ``index`` of ``count`` takes."""
    return items * index // count, items * (index + 1) // count
