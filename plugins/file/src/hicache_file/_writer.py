"""The writer: appends batches to lanes, and makes and seals the segments behind them (R2, R4, R5).

A segment is made whole under the root's lock, mostly ahead of need. From then
on its creator appends without any lock of the root: page bytes first, journal
records second, so that a record that reads well vouches for its page. One batch
costs one pwritev a chunk and one pwrite for its records.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hicache_core.status import Status
from hicache_file._budget import Ledger, RootFile
from hicache_file._catalog import Catalog
from hicache_file._evict import Evictor
from hicache_file._files import status_of, write_exactly
from hicache_file._follower import DOUBTED
from hicache_file._format import RECORD_NBYTES, total_nbytes
from hicache_file._journal import Words, build
from hicache_file._lanes import SHARED_FROM_NBYTES, Helper, Lane
from hicache_file._making import Made, Maker
from hicache_file._sealing import Sealer
from hicache_file._space import Space
from hicache_file._spares import Spares
from hicache_file._transfer import View, write_pages

#: A segment takes at most this part of the budget, open ones of all processes this part.
SEGMENT_SHARE, OPEN_SHARE = 128, 4


class NoRoom(OSError):
    """The budget, or a fair share of it, is used up."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.ENOSPC, why)


class OneLane(Exception):
    """There is room for one lane only; not an error."""


@dataclass(slots=True, eq=False)
class Batch:
    """Pages to append, and what became of each."""

    digests: Sequence[bytes]
    checks: Words
    views: Sequence[View]
    buffers_per_page: int
    nbytes: int
    statuses: list[Status]
    places: list[int]
    """Where each page was put, as soon as it is there."""
    touched: set[bytes] = field(default_factory=set)
    """Segments that this batch wrote to, which its later pages must not evict."""


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """What of the options concerns writing."""

    segment_nbytes: int
    lanes: int
    checksum: bool
    fsync: bool
    network: bool
    timeout_s: float


class Writer:
    """Appends for one instance; thread-safe."""

    def __init__(
        self,
        space: Space,
        root: RootFile,
        settings: WriterSettings,
        *,
        known: Callable[[], Catalog],
        current: Callable[[], Catalog],
        capacity: int,
    ) -> None:
        self._space = space
        self._root = root
        self._settings = settings
        #: The catalog as last seen: what a clear overtakes is found out at the end, and appended again.
        self._known = known
        self._lanes = [Lane() for _ in range(settings.lanes)]
        #: The root's budget as last seen, 0 for none.
        self.capacity = capacity
        self.helper = Helper()
        self.evictor = Evictor(root, space.janitor, fsync=settings.fsync, let_go=self._let_go)
        self._sealer = Sealer(space, root, current, fsync=settings.fsync, timeout_s=settings.timeout_s)
        self._maker = Maker(
            space,
            known,
            # Not where data is flushed: the disk must then never hold an old journal beside new pages. Not on
            # network file systems, whose locks may not reach everybody.
            reusable=settings.checksum and not settings.fsync and not settings.network,
            fsync=settings.fsync,
            timeout_s=settings.timeout_s,
        )
        self._spares = Spares(
            self._maker,
            self.evictor,
            self._sealer,
            most=settings.lanes,
            known=known,
            spared=self._spared,
        )
        self._running: list[Batch] = []

    def append(self, batch: Batch) -> None:
        """Write a batch; its statuses say what came of each page."""
        self._running.append(batch)
        try:
            self._append_shared(batch)
        finally:
            self._running.remove(batch)

    def _append_shared(self, batch: Batch) -> None:
        """Use both lanes where it pays."""
        count = len(batch.digests)
        big = len(self._lanes) > 1 and count > 1 and count * batch.nbytes >= SHARED_FROM_NBYTES
        if not (big and self.helper.claim()):
            self._append_on_any(batch, 0, count)
            return
        half = count // 2
        self.helper.share(
            lambda: self._append(self._lanes[1], batch, half, count),
            lambda: self._append(self._lanes[0], batch, 0, half),
        )

    def seal(self, timeout_s: float) -> None:
        """Seal every lane and end the threads; for close(), with no verb running.

        Raises:
            OSError.
        """
        self.helper.close(timeout_s)
        self._space.janitor.close(timeout_s)
        with self._root.held(timeout_s) as ledger:
            self._sealer.drain(ledger)
            for lane in self._lanes:
                self._sealer.seal(lane, ledger)
            self._spares.close(ledger)
            self.evictor.finish(ledger)

    def flush(self, timeout_s: float) -> None:
        """Seal what is full, so that the books say what the files take.

        Raises:
            OSError.
        """
        self._space.janitor.flush(timeout_s)
        with self._root.held(timeout_s) as ledger:
            self._sealer.drain(ledger)

    def drop_void(self, epoch: int, timeout_s: float) -> None:
        """Leave lanes whose epoch is over, where no set is at work on them."""
        with self._root.held(timeout_s) as ledger:
            self._spares.drop(ledger, epoch)
            for lane in self._lanes:
                if lane.lock.acquire(blocking=False):
                    try:
                        if lane.segment is not None and lane.segment.header.epoch != epoch:
                            self._sealer.seal(lane, ledger)
                    finally:
                        lane.lock.release()

    def close(self) -> None:
        """Give the evictor's descriptors back."""
        self.evictor.close()

    def _append_on_any(self, batch: Batch, start: int, stop: int) -> None:
        """Use a lane that is free, or wait for the first."""
        for lane in reversed(self._lanes[1:]):
            if self._lanes[0].lock.locked() and lane.segment is not None and not lane.lock.locked():
                self._append(lane, batch, start, stop)
                return
        self._append(self._lanes[0], batch, start, stop)

    def _append(self, lane: Lane, batch: Batch, start: int, stop: int) -> None:
        if not lane.lock.acquire(timeout=self._settings.timeout_s):
            batch.statuses[start:stop] = [Status.TIMEOUT] * (stop - start)
            return
        try:
            while start < stop:
                start += self._append_some(lane, batch, start, stop)
            return
        except OneLane:
            pass
        except OSError as error:
            batch.statuses[start:stop] = [status_of(error)] * (stop - start)
            return
        finally:
            lane.lock.release()
        self._append(self._lanes[0], batch, start, stop)

    def _append_some(self, lane: Lane, batch: Batch, start: int, stop: int) -> int:
        """Write as many pages as the open segment takes, one at least; the lane is locked."""
        catalog = self._known()
        if not lane.fits(batch.nbytes) or lane.segment is None or lane.segment.header.epoch != catalog.epoch:
            self._renew(lane, catalog, batch)
        segment, handle = lane.segment, lane.handle
        count = min(stop - start, lane.fits(batch.nbytes))
        if segment is None or handle is None or segment.table is None or count < 1:
            raise NoRoom("a new segment takes no page")
        batch.touched.add(segment.header.id)
        sums: list[int] | None = [] if self._settings.checksum else None
        per = batch.buffers_per_page
        views = batch.views[start * per : (start + count) * per]
        write_pages(handle.seg, lane.data_end, views, per, batch.nbytes, sums)
        if self._settings.fsync:
            os.fdatasync(handle.seg)
        digests, first = batch.digests[start : start + count], segment.count
        records = build(
            segment.header.id,
            first,
            digests,
            batch.checks[start : start + count],
            offset=lane.data_end,
            nbytes=batch.nbytes,
            sums=sums,
        )
        segment.table[first : first + count] = records
        lane.torn = True  # others may read the records before they are counted: nothing goes over them
        try:
            write_exactly(
                handle.idx, records.data.cast("B"), segment.header.records_start + first * RECORD_NBYTES
            )
            if self._settings.fsync:
                os.fdatasync(handle.idx)
            lane.data_end += count * batch.nbytes
            with self._space.lock:
                batch.places[start : start + count] = self._known().append(segment, digests)
            lane.torn = False
        finally:
            if lane.torn:
                with self._space.lock:
                    self._known().words = DOUBTED
        return count

    def _renew(self, lane: Lane, catalog: Catalog, batch: Batch) -> None:
        """Seal what the lane has and open a new segment, making room for it.

        Raises:
            OneLane; OSError: ENOSPC, EACCES, ETIMEDOUT ...
        """
        spare = self._spares.take(catalog.epoch, batch.nbytes)
        if spare is not None and self._sealer.retire(lane):
            self._enter(lane, spare, batch)
            return
        with self._root.held(self._settings.timeout_s) as ledger:
            self.capacity = ledger.capacity
            self._sealer.leave(lane, ledger)
            spare = spare or self._spares.take(catalog.epoch, batch.nbytes)
            if spare is None:
                spare = self._made(lane, ledger, catalog, batch)
        self._enter(lane, spare, batch)

    def _enter(self, lane: Lane, made: Made, batch: Batch) -> None:
        """Have a lane append to a new segment, and the next ones made if more will be needed soon."""
        lane.enter(*made)
        if self._spares.note(made.segment.header.nbytes, batch.nbytes):
            posted = self._space.janitor.post(lambda: self._sealer.tend(self._spares.fill))
        else:
            posted = not self._sealer.busy or self._space.janitor.post(self._sealer.tend)
        if not posted:
            self._sealer.tend()

    def _made(self, lane: Lane, ledger: Ledger, catalog: Catalog, batch: Batch) -> Made:
        """Make a segment now, as large as it can be had."""
        nbytes = self._wanted_nbytes(lane, ledger, batch.nbytes)
        least = batch.nbytes
        while True:
            try:
                taken = self.evictor.make_room(ledger, nbytes, batch.touched)
                return self._maker.make(ledger, catalog.epoch, nbytes, batch.nbytes, taken)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                if not (self._sealer.drain(ledger) or self._spares.drop(ledger)):
                    if nbytes <= least:
                        raise
                    nbytes = max(least, nbytes // 2)

    def _let_go(self, segment_id: bytes) -> bool:
        """Close our files of an evicted segment; True where it may be taken over."""
        segment = self._known().by_id(segment_id)
        return segment is not None and segment.reusable and self._space.handles.let_go(segment.ordinal)

    def _spared(self) -> set[bytes]:
        """Give the segments that running sets have written to: their pages must outlive them."""
        return set().union(*(batch.touched for batch in list(self._running)))

    def _wanted_nbytes(self, lane: Lane, ledger: Ledger, page_nbytes: int) -> int:
        """Choose a segment's size: the usual one, or what a fair share of a small budget leaves.

        Raises:
            OneLane, NoRoom.
        """
        least = page_nbytes
        if not ledger.capacity:
            return max(least, _whole_pages(self._settings.segment_nbytes, page_nbytes))
        usual = min(self._settings.segment_nbytes, ledger.capacity // SEGMENT_SHARE)
        nbytes = max(least, _whole_pages(usual, page_nbytes))
        share = ledger.capacity // OPEN_SHARE
        if ledger.open_nbytes + total_nbytes(nbytes) > share:
            self._sealer.drain(ledger)
            ledger.reap()
        if ledger.open_nbytes + total_nbytes(nbytes) > share and lane is not self._lanes[0]:
            raise OneLane
        while ledger.open_nbytes + total_nbytes(nbytes) > share:
            if nbytes <= least:
                raise NoRoom("open segments take a quarter of the budget already")
            nbytes = max(least, nbytes // 2)
        return nbytes


def _whole_pages(nbytes: int, page_nbytes: int) -> int:
    """Make a segment hold whole pages, so that a full one has no tail to cut."""
    return nbytes // page_nbytes * page_nbytes
