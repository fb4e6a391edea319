"""PageAllocator: which pages of a host pool are free."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from hicache_core.errors import InvalidPages


class PageAllocator:
    """Hands out page indices and takes them back; thread-safe."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._lock = threading.Lock()
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken = bytearray(num_pages)

    @property
    def available(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Give ``count`` pages, or None and nothing when there are fewer."""
        with self._lock:
            if count > len(self._free):
                return None
            pages = [self._free.pop() for _ in range(count)]
            for page in pages:
                self._taken[page] = 1
            return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Free pages.

        Raises:
            InvalidPages: one that is free already, or outside the pool; then none was freed.
        """
        returned = list(pages)
        with self._lock:
            wrong = [page for page in returned if not 0 <= page < self.num_pages or not self._taken[page]]
            if wrong or len(set(returned)) != len(returned):
                raise InvalidPages(
                    "pages given back that were not taken",
                    value=f"{(wrong or returned)[:8]}",
                    remedy="Give each page back once.",
                )
            for page in returned:
                self._taken[page] = 0
            self._free.extend(returned)
