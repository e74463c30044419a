"""A gate that one thread waits at and another opens, in a few microseconds where a lock takes thirty and more.

Theory. Waking a sleeping thread is a system call, an interrupt and a context switch (20 to 40 us each way on a virtual machine), and a
decode window hands work over a hundred times. So the waiter first looks, for up to a millisecond, at the flags in memory, and
sleeps only if nothing comes. Python cannot look without holding the GIL, which the opener needs; NumPy can: ``any`` over a view
with stride 0 reads one byte again and again, without the GIL, and ends at the first True.

The GIL has to be free as well when the waiter comes back, else it sleeps after all. The opener still holds it for some microseconds, on
its way into a NumPy loop. So the view has ``GRACE`` rows, one flag each, all raised by ``open``: what remains of the rows after the
first True is a delay of some 25 ns each.

Where looking does not pay (fewer free cores than threads: the waiter keeps the opener from running), it is soon left off, and tried again
now and then.
"""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue

import numpy as np
from numpy.lib.stride_tricks import as_strided

GRACE = 384
# 384 rows of 8,192 looks of 0.3 ns are a millisecond. A row is as long as NumPy's buffer: shorter ones are copied to it, and the copy
# is what NumPy then looks at.
LOOKS = 8_192
# A wait that looked in vain costs this many quick ones.
VAIN = 16
PATIENCE = VAIN


class Gate:
    """Starts closed. ``open`` and ``wait`` may be called from any thread, ``wait`` from one at a time.

    ``grace``: flags and rows of the view; threads that wait for the same opener should differ, or they come back at once and meet at
    the GIL.
    """

    def __init__(self, grace: int = GRACE) -> None:
        self._flags = bytearray(grace)
        self._raised, self._lowered = b"\1" * grace, bytes(grace)
        flags = np.frombuffer(self._flags, np.bool_)
        view = as_strided(flags, (grace, LOOKS), (1, 0), writeable=False)
        self._look = partial(np.logical_or.reduce, view, None)
        self._asleep = False
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._debt = 0

    def open(self) -> None:
        """Let the waiter pass, now or when it comes; opening an open gate changes nothing."""
        self._flags[:] = self._raised
        if self._asleep:
            self._wakes.put(None)

    def wait(self) -> None:
        """Return once the gate is open, and close it."""
        # Nothing is done here before the look: the other thread may be about to want the GIL.
        if not self._flags[0] and (self._debt > PATIENCE or not self._look()):
            self._sleep()
        elif self._debt:
            self._debt -= 1
        self._flags[:] = self._lowered

    def _sleep(self) -> None:
        self._debt += VAIN if self._debt <= PATIENCE else -1
        self._asleep = True
        # ``open`` may have come before the line above: only the flags tell, a wake is just a reason to look at them.
        while not self._flags[0]:
            self._wakes.get()
        self._asleep = False
