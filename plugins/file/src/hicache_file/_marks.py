"""Marks beside a segment's records: use bytes for the evictor, dead bytes for everybody (R6).

Written with pwrite, runs of neighbours at once, and only where they change: a
use byte is the age of the segment when its page was last used, so it changes
once a segment's time and not once a get. Nothing is mapped, so a journal that
somebody cuts short cannot kill a process; a mark beyond its end is lost.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from hicache_core.status import OK, Status
from hicache_file._catalog import Catalog
from hicache_file._files import status_of, write_exactly
from hicache_file._format import BURIED, DAMAGED, Event
from hicache_file._index import ABSENT, RECORD_BITS, RECORD_MASK
from hicache_file._segment import Segment

#: A use byte counts segments made since its own, from 1, up to this.
_OLDEST = 255


def mark(catalog: Catalog, places: Sequence[int]) -> None:
    """Count a use of each page.

    Raises:
        OSError: marks may be lost.
    """
    known = np.array([place for place in places if place != ABSENT], np.int64)
    ordinals = known >> RECORD_BITS
    for ordinal in dict.fromkeys(ordinals.tolist()):
        segment = catalog.segment(ordinal)
        if segment is not None:
            mark_records(catalog, segment, known[ordinals == ordinal] & RECORD_MASK)


def mark_records(catalog: Catalog, segment: Segment, numbers: np.ndarray) -> None:
    """Count a use of these records of one segment."""
    header = segment.header
    age = min(_OLDEST, 1 + max(0, catalog.latest_sequence - header.sequence))
    marks = segment.marks
    if marks is None:
        marks = segment.marks = np.zeros(header.room, np.uint8)
    stale = numbers[marks[numbers] != age]
    if not len(stale):
        return
    stale = np.unique(stale)
    breaks = np.flatnonzero(np.diff(stale) != 1) + 1
    try:
        handle = catalog.space.handles.take(segment)
    except ValueError:
        return
    try:
        for start, stop in zip((0, *breaks.tolist()), (*breaks.tolist(), len(stale)), strict=True):
            payload = bytes([age]) * (stop - start)
            write_exactly(handle.idx, payload, header.use_start + int(stale[start]))
        marks[stale] = age
    finally:
        catalog.space.handles.give(handle)


def bury(
    catalog: Catalog, digests: Sequence[bytes], copies: Sequence[Sequence[int]], kind: int
) -> list[Status]:
    """Declare copies of pages dead, for every process; the namespace's lock is held.

    The dead byte is the truth, the event tells those who run. A copy that an
    eviction is moving at this moment is safe: it reads the dead bytes again
    under the same lock before it publishes the new one.

    Returns: OK where there was a copy, MISS where not, or why it could not be buried.
    """
    events: list[Event] = []
    statuses = []
    seen: set[bytes] = set()
    for digest, places in zip(digests, copies, strict=True):
        status = OK if places and digest not in seen else Status.MISS
        seen.add(digest)
        for place in places if status is OK else ():
            try:
                event = _bury_one(catalog, place, kind)
            except OSError as error:
                status = status_of(error)
                continue
            if event is not None:
                events.append(event)
            catalog.bury(digest, place, damaged=kind == DAMAGED)
        statuses.append(status)
    if events:
        catalog.space.epoch.append(events, catalog.epoch)
    return statuses


def _bury_one(catalog: Catalog, place: int, kind: int) -> Event | None:
    segment = catalog.segment(place >> RECORD_BITS)
    if segment is None:
        return None
    number = place & RECORD_MASK
    try:
        handle = catalog.space.handles.take(segment)
    except (FileNotFoundError, ValueError):
        catalog.forget(segment)
        return None
    try:
        os.pwrite(handle.idx, bytes([kind]), segment.header.dead_start + number)
    finally:
        catalog.space.handles.give(handle)
    return Event(BURIED, segment.header.id, number << 8 | kind)
