"""One allocator for the KV pages of all slots: a stack of free pages and a reference count for each.

A page's count is the number of conversations whose page table names it. A conversation with a window or a copy in flight
keeps its pages until that has reported, so a count of 0 also means that nothing on the device will touch the page any more.
Full pages may be shared; whoever shares one never writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class OutOfPages(Exception):
    """More pages were asked for than are free. Callers make room first, so this is a bug."""


class PageAllocator:
    """Pages 0 .. num_pages-1. The page freed last is given out first (it is likelier to be warm)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages with one reference each. Raises ``OutOfPages`` and takes none where fewer are free."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        if count <= 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for page in taken:
            self.refs[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more reference on each of these pages, all of which somebody owns already."""
        refs = self.refs
        for page in pages:
            if not refs[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less; pages that nobody names any more become free."""
        refs, free = self.refs, self._free
        for page in reversed(pages):
            refs[page] -= 1
            if not refs[page]:
                free.append(page)
            elif refs[page] < 0:
                refs[page] = 0
                raise ValueError(f"page {page} was released more often than it was taken")

    def num_exclusive(self, pages: Iterable[int]) -> int:
        """How many of these pages would become free if their one owner let go."""
        return list(map(self.refs.__getitem__, pages)).count(1)

    def has_exclusive(self, pages: Sequence[int]) -> bool:
        """Whether any would; what is shared is the beginning, so the end is looked at first."""
        refs = self.refs
        return any(refs[page] == 1 for page in reversed(pages))

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises ``AssertionError`` unless the counts are what these page tables, all there are, add up to."""
        counts: Counter[int] = Counter()
        for table in tables:
            assert len(set(table)) == len(table), f"a page table names a page twice: {table}"
            counts.update(table)
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        for page, refs in enumerate(self.refs):
            assert refs == counts[page], f"page {page} has {refs} references counted and {counts[page]} real ones"
            assert (page in free) == (refs == 0), f"page {page} is free and owned, or neither"
