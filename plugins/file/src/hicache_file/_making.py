"""Making segments: two files, entered in the root's table first and announced last (R1, R4).

Everything happens under the root's lock: the table's entry, the files, flocked
and preallocated, the header, the event. A crash at any step leaves an entry
that nobody has flocked, which the next one to look removes.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hicache_file._budget import Ledger, remove_pair
from hicache_file._catalog import Catalog
from hicache_file._evict import Taken
from hicache_file._files import lock_shared, preallocate, try_lock, write_exactly
from hicache_file._format import (
    CREATED,
    RECORD_NBYTES,
    Event,
    SegmentHeader,
    Slot,
    journal_nbytes,
    journal_room,
    pack_journal_head,
    total_nbytes,
)
from hicache_file._journal import WORDS
from hicache_file._segment import Handle, Segment
from hicache_file._space import Space

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


class Made(NamedTuple):
    """A new segment of ours, open, empty and flocked."""

    segment: Segment
    handle: Handle


class Maker:
    """Makes segments for one instance; used under the root's lock.

    Args:
        reusable: whether they may be taken over once they are evicted.
    """

    def __init__(
        self, space: Space, known: Callable[[], Catalog], *, reusable: bool, fsync: bool, timeout_s: float
    ) -> None:
        self._space = space
        self._known = known
        self._reusable = reusable
        self._fsync = fsync
        self._timeout_s = timeout_s

    def make(
        self, ledger: Ledger, epoch: int, nbytes: int, page_nbytes: int, taken: Taken | None = None
    ) -> Made:
        """Make a segment of this size, to be filled with pages of that size at first.

        Args:
            taken: an evicted segment whose files become this one's, if there is one.

        Raises:
            OSError: nothing of it is left, nor of ``taken``.
        """
        space = self._space
        header = SegmentHeader(
            id=os.urandom(16),
            namespace=space.namespace,
            boot=space.boot,
            sequence=ledger.draw_sequence(),
            epoch=epoch,
            room=journal_room(nbytes),
            nbytes=nbytes,
            created_ns=time.time_ns(),
            inode=0,
            synced=self._fsync,
        )
        total = total_nbytes(nbytes)
        ledger.begin()
        ledger.register(Slot(space.namespace, header.id, total))
        segment = space.new_segment(header)
        segment.mine, segment.reusable = True, self._reusable
        segment.table = np.zeros((header.room, WORDS), np.uint64)
        with space.lock:  # before others can hear of it: our own catalog must not take it for theirs
            space.own[header.id] = segment
        try:
            seg, idx = self._make_files(ledger, segment, page_nbytes, taken)
        except BaseException:
            with space.lock:
                del space.own[header.id]
            raise
        ledger.used += total
        with space.lock:
            self._known().create(segment)
        return Made(segment, space.handles.adopt(segment, seg, idx))

    def _make_files(
        self, ledger: Ledger, segment: Segment, page_nbytes: int, taken: Taken | None
    ) -> tuple[int, int]:
        folder, name, header = self._space.folder, segment.name, segment.header
        made = [] if taken is None else [taken.idx]
        try:
            if taken is None:
                idx = folder.open(f"{name}.idx", _NEW)
                made.append(idx)
                seg = folder.open(f"{name}.seg", _NEW)
            else:
                idx = taken.idx
                folder.rename(f"{taken.name}.seg", f"{name}.seg")
                folder.rename(f"{taken.name}.idx", f"{name}.idx")
                seg = folder.open(f"{name}.seg", os.O_RDWR)
            made.append(seg)
            if not try_lock(seg):
                raise OSError(errno.ENOLCK, "a new segment cannot be locked")
            preallocate(seg, header.nbytes)
            segment.header = header = replace(header, inode=os.fstat(seg).st_ino)
            _prepare_journal(idx, header, page_nbytes)
            lock_shared(idx)
            if self._fsync:
                os.fsync(seg)
                os.fsync(idx)
                folder.sync()
            with self._space.epoch.lock.held(self._timeout_s):
                self._space.epoch.append([Event(CREATED, header.id, header.sequence)], header.epoch)
            return seg, idx
        except BaseException:
            for fd in made:
                os.close(fd)
            remove_pair(folder, name)
            if taken is not None:
                remove_pair(folder, taken.name)
            ledger.unregister(header.id)
            raise


def _prepare_journal(idx: int, header: SegmentHeader, page_nbytes: int) -> None:
    """Head a journal, and reserve blocks for as many records as pages of this size need.

    For smaller pages it reserves length only, for cutting off unused blocks costs 0.1 ms a segment: should
    they come and the disk be full, their records cannot be written, and their set says NO_SPACE. Records of a
    segment that was taken over may stay behind the head: their seals bind them to its id.
    """
    records = min(header.room, header.nbytes // page_nbytes)
    preallocate(idx, header.records_start + records * RECORD_NBYTES)
    os.ftruncate(idx, journal_nbytes(header.room))
    write_exactly(idx, pack_journal_head(header).ljust(header.records_start, b"\0"), 0)
