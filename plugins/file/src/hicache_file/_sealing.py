"""Sealing segments: giving back unused tails, behind the back of the sets that filled them.

Cutting a preallocated journal takes .2 ms on an idle machine and milliseconds
on a busy one, so a full segment is retired: its lane goes on at once, and the
janitor cuts it. A retired segment stays in the root's table, flocked and counted
with all that was preallocated for it, until it is cut; so a crash anywhere
leaves what a crash of its writer leaves. Small budgets, where a tail is a page,
seal at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from hicache_file._budget import Ledger, RootFile
from hicache_file._catalog import Catalog
from hicache_file._epoch import SMALL_CAPACITY_NBYTES
from hicache_file._files import unlock
from hicache_file._format import RECORD_NBYTES
from hicache_file._journal import LENGTH, OFFSET, parse
from hicache_file._lanes import Lane
from hicache_file._segment import Handle, Segment
from hicache_file._space import Space

#: Retired segments that may wait; beyond, lanes seal their own.
_MOST_RETIRED = 4


class _Retired(NamedTuple):
    segment: Segment
    handle: Handle
    data_end: int


class Sealer:
    """Seals for one instance; thread-safe."""

    def __init__(
        self, space: Space, root: RootFile, current: Callable[[], Catalog], *, fsync: bool, timeout_s: float
    ) -> None:
        self._space = space
        self._root = root
        self._current = current
        self._fsync = fsync
        self._timeout_s = timeout_s
        self._waiting: list[_Retired] = []
        self._lock = threading.Lock()

    def leave(self, lane: Lane, ledger: Ledger) -> None:
        """Seal what a lane has, now or soon, and leave the lane empty; lane and root are locked."""
        small = 0 < ledger.capacity < SMALL_CAPACITY_NBYTES
        if small or not self.retire(lane):
            self.seal(lane, ledger)

    @property
    def busy(self) -> bool:
        """True while there is something for ``tend`` to do."""
        return bool(self._waiting)

    def retire(self, lane: Lane) -> bool:
        """Leave a lane's segment to ``tend``, and the lane empty; the lane is locked. False: ``leave`` it."""
        if lane.segment is not None and (
            lane.torn or not lane.segment.count or len(self._waiting) >= _MOST_RETIRED
        ):
            return False
        retired = self._retired(lane)
        if retired is not None:
            with self._lock:
                self._waiting.append(retired)
        return True

    def seal(self, lane: Lane, ledger: Ledger) -> None:
        """Seal what a lane has, now; lane and root are locked."""
        retired = self._retired(lane)
        if retired is not None:
            self._finish(retired, ledger)

    def drain(self, ledger: Ledger) -> bool:
        """Seal now what was to be sealed soon; the root is locked. False when there was nothing."""
        done = False
        while (retired := self._next()) is not None:
            self._finish(retired, ledger)
            done = True
        return done

    def _finish(self, retired: _Retired, ledger: Ledger) -> None:
        """Cut and settle a segment; one whose sealing is interrupted waits for the next occasion."""
        users = retired.handle.users
        try:
            self._cut(retired)
            self._settle(retired, ledger)
        except OSError:
            raise
        except BaseException:
            if retired.handle.users == users:  # not given back yet, and all before that may be done twice
                with self._lock:
                    self._waiting.append(retired)
            raise

    def _retired(self, lane: Lane) -> _Retired | None:
        segment, handle, data_end = lane.segment, lane.handle, lane.data_end
        count = 0 if segment is None else segment.count
        if lane.torn and segment is not None and handle is not None:
            data_end, count = _found(segment, handle)
        lane.leave()
        if segment is None or handle is None:
            return None
        with self._space.lock:
            segment.count = count
            segment.mine, segment.final, segment.table = False, True, None
        return _Retired(segment, handle, data_end)

    def tend(self, then: Callable[[Ledger], None] | None = None) -> None:
        """Seal what was retired, then do something else under the root's lock; the janitor's work."""
        cut: list[_Retired] = []
        try:
            while (retired := self._next()) is not None:
                cut.append(retired)
                self._cut(retired)
            if not cut and then is None:
                return
            with self._root.held(self._timeout_s) as ledger:
                while cut:
                    self._settle(cut.pop(), ledger)
                if then is not None:
                    then(ledger)
        except OSError:
            with self._lock:  # close() tries again; what it cannot seal, the next opener does
                self._waiting.extend(cut)

    def remove(self, segment: Segment, handle: Handle, ledger: Ledger) -> None:
        """Give back an open segment that holds nothing; the root is locked."""
        self._settle(_Retired(segment, handle, 0), ledger)

    def _next(self) -> _Retired | None:
        with self._lock:
            return self._waiting.pop(0) if self._waiting else None

    def _cut(self, retired: _Retired) -> None:
        """Shrink the two files to what they hold; needs no lock, since nobody else may."""
        segment, handle, data_end = retired
        if segment.count:
            os.ftruncate(handle.seg, data_end)
            os.ftruncate(handle.idx, segment.header.records_start + segment.count * RECORD_NBYTES)
            if self._fsync:
                os.fdatasync(handle.seg)
                os.fdatasync(handle.idx)

    def _settle(self, retired: _Retired, ledger: Ledger) -> None:
        """Enter in the books that a segment is sealed, or gone; the root is locked."""
        segment, handle, _ = retired
        ledger.begin()
        if not segment.count or segment.header.epoch != self._current().epoch:
            ledger.remove(self._space.folder, segment.name)
            self._current().forget(segment)
        else:
            ledger.settle(self._space.folder, segment.name)
        unlock(handle.seg)
        with self._space.lock:
            self._space.own.pop(segment.header.id, None)
        self._space.handles.give(handle)


def _found(segment: Segment, handle: Handle) -> tuple[int, int]:
    """Give where the pages end, and how many there are, by a journal whose last records may not be counted.

    Others may have read those, and rely on them.
    """
    header = segment.header
    raw = os.pread(handle.idx, header.room * RECORD_NBYTES, header.records_start)
    records = parse(raw, header.id)
    end = int((records[:, OFFSET] + records[:, LENGTH]).max()) if len(records) else 0
    return end, len(records)
