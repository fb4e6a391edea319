"""Spare segments: the next ones, made by the janitor before a lane needs them.

Making a segment takes a quarter of a millisecond under the root's lock, and two
lanes that fill up in the same batch wait for each other there. A writer that
fills segments quickly therefore has the janitor make the next two, evict for
them and seal the last two, all in one go. A spare is an open segment like any
other: in the root's table, flocked, counted; if its process dies it is removed.

Spares are for big segments of a bounded store only, and never beyond an eighth
of the budget, so that they neither starve other writers nor cost small stores
what they could hold.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Collection

from hicache_file._budget import Ledger
from hicache_file._catalog import Catalog
from hicache_file._evict import Evictor
from hicache_file._format import total_nbytes
from hicache_file._making import Made, Maker
from hicache_file._sealing import Sealer

#: Smaller segments are made when they are needed: their store is small, and a spare would take a part of it.
_FROM_NBYTES = 4 << 20
#: Spares of all processes end at this part of the budget.
_SHARE = 8
#: Who needs segments less often than this can wait for them.
_PACE_S = 1.0


class Spares:
    """The spare segments of one instance; thread-safe.

    Args:
        most: how many are kept ready.
        spared: gives the ids of segments that running sets have written to, which must not be evicted.
    """

    def __init__(
        self,
        maker: Maker,
        evictor: Evictor,
        sealer: Sealer,
        *,
        most: int,
        known: Callable[[], Catalog],
        spared: Callable[[], Collection[bytes]],
    ) -> None:
        self._maker = maker
        self._evictor = evictor
        self._sealer = sealer
        self._most = most
        self._known = known
        self._spared = spared
        self._lock = threading.Lock()
        self._ready: list[Made] = []
        self._page_nbytes = 0
        self._needed_s = 0.0
        #: The segment size that is worth keeping ready; 0 for none.
        self._nbytes = 0

    def take(self, epoch: int, page_nbytes: int) -> Made | None:
        """Give a spare that pages of this size can go to, or None."""
        with self._lock:
            for at, made in enumerate(self._ready):
                header = made.segment.header
                if header.epoch == epoch and header.nbytes >= page_nbytes:
                    return self._ready.pop(at)
        return None

    def note(self, nbytes: int, page_nbytes: int) -> bool:
        """Hear that a lane needed a segment of this size; tell whether the next ones are to be made."""
        now = time.monotonic()
        with self._lock:
            quick = now - self._needed_s < _PACE_S
            self._needed_s = now
            self._nbytes = nbytes if nbytes >= _FROM_NBYTES else 0
            self._page_nbytes = page_nbytes
            return quick and self._nbytes > 0

    def fill(self, ledger: Ledger) -> None:
        """Make what is missing; the root is locked. What cannot be had is left to the lane that needs it."""
        self.drop(ledger, self._known().epoch)
        while ledger.capacity and self._nbytes and len(self._ready) < self._most:
            total = total_nbytes(self._nbytes)
            if ledger.open_nbytes + total > ledger.capacity // _SHARE:
                return
            try:
                taken = self._evictor.make_room(ledger, self._nbytes, self._spared())
                made = self._maker.make(ledger, self._known().epoch, self._nbytes, self._page_nbytes, taken)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return
            with self._lock:
                self._ready.append(made)

    def drop(self, ledger: Ledger, keep_epoch: int | None = None) -> bool:
        """Give back spares, or those of other epochs only; the root is locked. False when there was none."""
        with self._lock:
            doomed = [made for made in self._ready if made.segment.header.epoch != keep_epoch]
            self._ready = [made for made in self._ready if made not in doomed]
        for made in doomed:
            self._sealer.remove(made.segment, made.handle, ledger)
        return bool(doomed)

    def close(self, ledger: Ledger) -> None:
        """Give all back and make no more; the root is locked."""
        self._most = 0
        self.drop(ledger)
