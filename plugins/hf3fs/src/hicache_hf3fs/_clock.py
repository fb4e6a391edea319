"""Who may take a page: the clock that chooses victims, the readers that hold pages, the leases that run out.

Pure, in memory, under the caller's lock. Nothing here needs to survive a crash: use bits are a hint, holds
end with time, and a lease that was running when the metadata went down runs anew in full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from math import inf

_IDLE, _USED, _TAKEN, _TAKEN_AHEAD = 0, 1, 2, 3
#: What the hand leaves behind it: used becomes idle, taken stays.
_PASSED = bytes([_IDLE, _IDLE, _TAKEN, _TAKEN]) + bytes(252)
#: What a page becomes that holds a key from now on.
_SETTLED = (_IDLE, _USED, _IDLE, _USED)


class Clock:
    """Second chance over the pages of one file, a byte a page; flat in the number of pages.

    Pages start idle, so that nothing has to be scanned at start: a victim may turn out to hold no key, and
    the caller then goes on to the next.
    """

    def __init__(self, num_pages: int) -> None:
        self._pages = bytearray(num_pages)
        self._hand = 0

    def use(self, index: int) -> None:
        """Give a page that holds a key a second chance."""
        self._pages[index] = _USED

    def take(self, start: int, stop: int) -> None:
        """Keep pages that hold no key away from the hand."""
        self._pages[start:stop] = bytes([_TAKEN]) * (stop - start)

    def take_ahead(self, index: int) -> None:
        """Do so with a page that may lie just before the hand: with a key it has a second chance."""
        self._pages[index] = _TAKEN_AHEAD

    def settle(self, indices: Iterable[int]) -> None:
        """Let the hand have pages that hold a key from now on."""
        pages = self._pages
        for index in indices:
            pages[index] = _SETTLED[pages[index]]

    def forget(self) -> None:
        """Start anew, after a transaction that did not happen."""
        self._pages = bytearray(len(self._pages))

    def victims(self) -> Iterator[int]:
        """Give idle pages, each taken as it is given, until two rounds have found no more."""
        pages = self._pages
        left = 2 * len(pages) + 3  # the end of the file is met three times at most
        while left > 0:
            found = pages.find(_IDLE, self._hand)
            stop = found if found >= 0 else len(pages)
            pages[self._hand : stop] = pages[self._hand : stop].translate(_PASSED)
            left -= stop - self._hand + 1
            self._hand = stop + 1 if found >= 0 else 0
            if found >= 0:
                pages[found] = _TAKEN
                yield found


class Holds:
    """Reads in progress: which pages they hold, and until when."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._reads: dict[int, tuple[tuple[int, int], ...]] = {}
        self._ends: deque[tuple[float, int]] = deque()
        self._readers: dict[tuple[int, int], int] = {}

    def begin(self, hold: int, places: Iterable[tuple[int, int]], now: float) -> None:
        """Hold pages, each a (rank, index); a repeated request replaces the first."""
        self.end(hold)
        held = tuple(places)
        if not held:
            return
        self._reads[hold] = held
        self._ends.append((now + self._hold_s, hold))
        readers = self._readers
        for place in held:
            readers[place] = readers.get(place, 0) + 1

    def end(self, hold: int) -> None:
        """Let go; an unknown read has ended before."""
        for place in self._reads.pop(hold, ()):
            left = self._readers[place] - 1
            if left:
                self._readers[place] = left
            else:
                del self._readers[place]

    def expire(self, now: float) -> None:
        """End the reads whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            self.end(self._ends.popleft()[1])

    def holds(self, rank: int, index: int) -> bool:
        """True while somebody may be reading a page."""
        return (rank, index) in self._readers

    @property
    def pages(self) -> int:
        """How many pages are held."""
        return len(self._readers)


class Leases:
    """Reservations in the order in which they run out; all last equally long."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._open: dict[tuple[int, int], int] = {}
        self._ends: deque[tuple[float, int, int]] = deque()

    def begin(self, rank: int, lease: int, pages: int, now: float) -> None:
        """Start a lease of some pages."""
        self._open[rank, lease] = pages
        self._ends.append((now + self._lease_s, rank, lease))

    def settle(self, rank: int, lease: int, pages: int) -> None:
        """Note that some of its pages were confirmed or released."""
        left = self._open.get((rank, lease), 0) - pages
        if left > 0:
            self._open[rank, lease] = left
        else:
            self._open.pop((rank, lease), None)

    def expired(self, now: float) -> list[tuple[int, int, int]]:
        """Give and forget the leases that have run out: (rank, lease, pages unsettled)."""
        over: list[tuple[int, int, int]] = []
        while self._ends and self._ends[0][0] <= now:
            _, rank, lease = self._ends.popleft()
            pages = self._open.pop((rank, lease), None)
            if pages is not None:
                over.append((rank, lease, pages))
        return over

    def restore(self, over: Iterable[tuple[int, int, int]]) -> None:
        """Take back what ``expired`` gave, to be given again by the next call."""
        for rank, lease, pages in over:
            self._open[rank, lease] = pages
            self._ends.appendleft((-inf, rank, lease))

    @property
    def pages(self) -> int:
        """Pages that are reserved and neither confirmed nor released."""
        return sum(self._open.values())
