"""The reader: from places to bytes in slots.

Places of one segment are sorted by offset and neighbours coalesced into chunks,
each one preadv straight into the slots; the calling thread and the helper draw
chunks from one list and hash them while they are hot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hicache_core.memory import Pages
from hicache_core.status import OK, Status
from hicache_file._catalog import Catalog
from hicache_file._files import status_of
from hicache_file._format import BadHeader
from hicache_file._index import RECORD_BITS, RECORD_MASK
from hicache_file._journal import CHECK, FLAGS, LENGTH, OFFSET, SUM, Words
from hicache_file._lanes import SHARED_FROM_NBYTES, Helper
from hicache_file._records import read_rows
from hicache_file._segment import Handle, Handles, Segment
from hicache_file._transfer import Chunk, pages_per_chunk, read_chunk


@dataclass(slots=True)
class Plan:
    """What one get is about to read, and what it found out on the way."""

    places: list[int]
    checks: Words
    statuses: list[Status] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    """Positions whose segment, or record, turned out to be gone."""
    damaged: list[int] = field(default_factory=list)
    """Positions whose bytes do not match."""
    used: list[tuple[Segment, np.ndarray]] = field(default_factory=list)
    """Segments and their records that were read."""


class Reader:
    """Reads for one instance; thread-safe."""

    def __init__(self, handles: Handles, helper: Helper | None, *, checksum: bool) -> None:
        self._handles = handles
        self._helper = helper
        self._checksum = checksum

    def read(self, catalog: Catalog, plan: Plan, locs: Pages) -> None:
        """Fill the slots of all positions that have a place; settles ``plan.statuses``."""
        try:
            self._plan(catalog, plan, locs)
            if plan.chunks:
                self._run(plan, locs)
        finally:
            for handle in plan.handles:
                self._handles.give(handle)
            plan.handles.clear()

    def _plan(self, catalog: Catalog, plan: Plan, locs: Pages) -> None:
        plan.statuses = [OK] * len(plan.places)
        places = np.array(plan.places, np.int64)
        ordinals = places >> RECORD_BITS
        distinct = dict.fromkeys(ordinals.tolist())
        for ordinal in distinct:
            positions = (ordinals == ordinal).nonzero()[0] if len(distinct) > 1 else np.arange(len(places))
            if ordinal < 0:
                self._fill(plan, positions, Status.MISS)
                continue
            try:
                segment = catalog.segment(ordinal)
                if segment is None:
                    raise FileNotFoundError
                handle = self._handles.take(segment)
                plan.handles.append(handle)
                self._plan_segment(catalog, plan, segment, handle, positions, places[positions], locs)
            except (FileNotFoundError, ValueError):
                plan.lost.extend(positions.tolist())
            except OSError as error:
                self._fill(plan, positions, status_of(error))

    def _plan_segment(
        self,
        catalog: Catalog,
        plan: Plan,
        segment: Segment,
        handle: Handle,
        positions: np.ndarray,
        places: np.ndarray,
        locs: Pages,
    ) -> None:
        """Look at the records of one segment; 35 microseconds for 128 pages, most of it numpy's calls."""
        numbers = places & RECORD_MASK
        if len(numbers) > 1 and (numbers[1:] < numbers[:-1]).any():
            order = numbers.argsort(kind="stable")
            numbers, positions = numbers[order], positions[order]
        rows = read_rows(segment, handle.idx, numbers)
        good = rows[:, CHECK] == plan.checks[positions]
        if not good.all():  # a record that is lost, or another key with the same digest
            self._fill(plan, positions[~good], Status.MISS)
            rows, positions, numbers = rows[good], positions[good], numbers[good]
        good = rows[:, LENGTH] == locs.nbytes
        if not good.all():
            self._fill(plan, positions[~good], Status.SIZE_MISMATCH)
            rows, positions, numbers = rows[good], positions[good], numbers[good]
        if len(rows):
            sums = self._sums(segment, handle, rows)
            plan.used.append((segment, numbers))
            plan.chunks += _chunks(handle.seg, rows[:, OFFSET], positions, sums, locs)

    def _fill(self, plan: Plan, positions: np.ndarray, status: Status) -> None:
        for position in positions.tolist():
            plan.statuses[position] = status

    def _sums(self, segment: Segment, handle: Handle, rows: np.ndarray) -> list[int] | None:
        """Give the checksums to compare with; None where none is stored or none is asked for.

        Raises:
            BadHeader: no checksums, and not the file that was written.
        """
        if not (self._checksum or segment.verify) and handle.genuine:
            return None
        if rows[:, FLAGS].all():
            return rows[:, SUM].tolist()
        if not handle.genuine:
            raise BadHeader("pages without checksums in another file")
        return None

    def _run(self, plan: Plan, locs: Pages) -> None:
        """Read all chunks, on two threads when it pays."""
        views, per, nbytes = locs.buffers(), locs.segments_per_page, locs.nbytes
        shared = iter(plan.chunks)
        helper = self._helper
        draw = partial(self._draw, shared, plan, views, per, nbytes)
        big = len(plan.chunks) > 1 and len(plan.places) * nbytes >= SHARED_FROM_NBYTES
        if big and helper is not None and helper.claim():
            helper.share(draw, draw)
        else:
            draw()
        for position in plan.damaged:
            plan.statuses[position] = Status.CORRUPT

    def _draw(
        self, shared: Iterator[Chunk], plan: Plan, views: list[memoryview], per: int, nbytes: int
    ) -> None:
        for chunk in shared:
            try:
                read_chunk(chunk, views, per, nbytes, plan.damaged)
            except OSError as error:
                for position in chunk.positions:
                    plan.statuses[position] = status_of(error)


def _chunks(
    fd: int, offsets: np.ndarray, positions: np.ndarray, sums: list[int] | None, locs: Pages
) -> list[Chunk]:
    """Cut pages of one file, in its order, into runs of neighbours of at most a chunk."""
    nbytes = locs.nbytes
    step = pages_per_chunk(nbytes, locs.segments_per_page, summed=sums is not None)
    breaks = ((offsets[1:] - offsets[:-1]) != nbytes).nonzero()[0].tolist()
    starts, order = offsets.tolist(), positions.tolist()
    chunks: list[Chunk] = []
    first = 0
    for last in (*breaks, len(order) - 1):
        for at in range(first, last + 1, step):
            end = min(at + step, last + 1)
            chunks.append(Chunk(fd, starts[at], order[at:end], None if sums is None else sums[at:end]))
        first = last + 1
    return chunks
