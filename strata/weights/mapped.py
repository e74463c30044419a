"""A file mapped read-only, that checks its own size again before each use.

Reading a page that a file has lost since it was mapped ends the process (SIGBUS); no exception tells of it. So ``view`` asks the
operating system for the size once more. What happens between that and the read cannot be caught; a model is read once, at
load, and a download should go to another name and be renamed, never be written in place.
"""

from __future__ import annotations

import mmap
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.errors import ModelError


class MappedFile:
    """The bytes of one regular file. ``size`` is its length when it was opened."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if there is no such file, it cannot be read, or it is empty."""
        self.path = path
        try:
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                raise ModelError(f"{path}: is a folder; give the path of a .gguf file in it")
            if not stat.S_ISREG(mode):
                raise ModelError(f"{path}: is no regular file; give the path of a .gguf file")
            with path.open("rb") as file:
                if not file.seek(0, 2):
                    raise ModelError(f"{path}: is empty; download it again")
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"{path}: no such file; give the path of a .gguf file") from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read ({error}); check its permissions and its disk") from None
        self.size = len(self.bytes)
        self.closed = False

    def check_size(self) -> None:
        """Raises ModelError if the file has become shorter, ValueError if it was closed here."""
        if self.closed:
            raise ValueError(f"{self.path} was closed before its tensors were read")
        now = self.bytes.size()
        if now < self.size:
            raise ModelError(
                f"{self.path}: had {self.size} bytes when it was opened and has {now} now; do not write to a model file in use, "
                "restart with the whole file"
            )

    def view(self, start: int, count: int) -> NDArray[np.uint8]:
        """``count`` bytes from ``start`` on, uint8, read-only, not copied. Raises as check_size."""
        self.check_size()
        return np.frombuffer(self.bytes, dtype=np.uint8, count=count, offset=start)

    def close(self) -> None:
        """No more views. The memory is unmapped when the last view is gone; closing twice is fine."""
        if not self.closed:
            self.closed = True
            try:
                self.bytes.close()
            except BufferError:  # a view lives on and holds the mapping
                pass
