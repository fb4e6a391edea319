"""The reader: from places to bytes in slots.

Places of one segment are sorted by offset and neighbours coalesced into chunks,
each one preadv straight into the slots; the calling thread and the helper draw
chunks from one list and hash them while they are hot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache_core.memory import Pages
from hicache_core.status import OK, Status
from hicache_file._catalog import Catalog
from hicache_file._files import status_of
from hicache_file._index import RECORD_BITS, RECORD_MASK
from hicache_file._journal import CHECK, FLAGS, HAS_SUM, LENGTH, OFFSET, SUM
from hicache_file._lanes import SHARED_FROM_NBYTES, Helper
from hicache_file._segment import Handle, Handles, Segment
from hicache_file._transfer import Chunk, pages_per_chunk, read_chunks


@dataclass(slots=True)
class Plan:
    """What one get is about to read, and what it found out on the way."""

    statuses: list[Status]
    places: list[int]
    chunks: list[Chunk] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    """Positions whose segment turned out to be gone."""
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

    def read(self, catalog: Catalog, plan: Plan, checks: Sequence[int], locs: Pages) -> None:
        """Fill the slots of all positions that have a place; settles ``plan.statuses``."""
        try:
            self._plan(catalog, plan, checks, locs)
            if plan.chunks:
                self._run(plan, locs)
        finally:
            for handle in plan.handles:
                self._handles.give(handle)
            plan.handles.clear()

    def _plan(self, catalog: Catalog, plan: Plan, checks: Sequence[int], locs: Pages) -> None:
        places = np.array(plan.places, np.int64)
        ordinals = places >> RECORD_BITS
        for ordinal in dict.fromkeys(ordinals.tolist()):
            if ordinal < 0:
                continue
            positions = np.flatnonzero(ordinals == ordinal)
            segment = catalog.segment(ordinal)
            try:
                if segment is None:
                    raise FileNotFoundError
                handle = self._handles.take(segment)
                plan.handles.append(handle)
                self._plan_segment(catalog, plan, segment, handle, positions, places, checks, locs)
            except (FileNotFoundError, ValueError):
                plan.lost.extend(positions.tolist())
            except OSError as error:
                for position in positions.tolist():
                    plan.statuses[position] = status_of(error)

    def _plan_segment(
        self,
        catalog: Catalog,
        plan: Plan,
        segment: Segment,
        handle: Handle,
        positions: np.ndarray,
        places: np.ndarray,
        checks: Sequence[int],
        locs: Pages,
    ) -> None:
        numbers = places[positions] & RECORD_MASK
        low, high = int(numbers.min()), int(numbers.max())
        if high - low > 4 * len(numbers) + 64:
            rows = np.concatenate([catalog.records(segment, handle.idx, n, n) for n in numbers.tolist()])
        else:
            rows = catalog.records(segment, handle.idx, low, high)[numbers - low]
        nbytes = locs.nbytes
        wanted = np.array([checks[p] for p in positions.tolist()], np.uint64)
        fits = rows[:, LENGTH] == nbytes
        same = rows[:, CHECK] == wanted
        good = fits & same
        if not good.all():
            for position, is_same in zip(positions[~good].tolist(), same[~good].tolist(), strict=True):
                plan.statuses[position] = Status.SIZE_MISMATCH if is_same else Status.MISS
            rows, positions, numbers = rows[good], positions[good], numbers[good]
            if not len(rows):
                return
        offsets = rows[:, OFFSET].astype(np.int64)
        if (offsets[1:] <= offsets[:-1]).any():
            order = np.argsort(offsets, kind="stable")
            rows, positions, numbers, offsets = rows[order], positions[order], numbers[order], offsets[order]
        sums = self._sums(segment, rows)
        plan.used.append((segment, numbers))
        for position in positions.tolist():
            plan.statuses[position] = OK
        plan.chunks.extend(_chunks(handle.seg, offsets, positions, sums, nbytes, locs.segments_per_page))

    def _sums(self, segment: Segment, rows: np.ndarray) -> list[int] | None:
        """Give the checksums to compare with; None where none is stored or none is asked for."""
        if not (self._checksum or segment.verify):
            return None
        if (rows[:, FLAGS] & np.uint64(HAS_SUM)).all():
            return rows[:, SUM].tolist()
        return None

    def _run(self, plan: Plan, locs: Pages) -> None:
        """Read all chunks, on two threads when it pays."""
        views = locs.buffers()
        per, nbytes = locs.segments_per_page, locs.nbytes
        total = sum(len(chunk.positions) for chunk in plan.chunks) * nbytes
        shared = iter(plan.chunks)
        helper = self._helper
        if len(plan.chunks) > 1 and total >= SHARED_FROM_NBYTES and helper is not None and helper.claim():
            try:
                task = helper.start(lambda: self._draw(shared, plan, views, per, nbytes))
                try:
                    self._draw(shared, plan, views, per, nbytes)
                finally:
                    task.join()
            finally:
                helper.release()
        else:
            self._draw(shared, plan, views, per, nbytes)
        for position in plan.damaged:
            plan.statuses[position] = Status.CORRUPT

    def _draw(self, shared: object, plan: Plan, views: list[memoryview], per: int, nbytes: int) -> None:
        for chunk in shared:  # type: ignore[attr-defined]
            try:
                read_chunks(iter((chunk,)), views, per, nbytes, plan.damaged)
            except OSError as error:
                for position in chunk.positions:
                    plan.statuses[position] = status_of(error)


def _chunks(
    fd: int,
    offsets: np.ndarray,
    positions: np.ndarray,
    sums: list[int] | None,
    nbytes: int,
    buffers_per_page: int,
) -> list[Chunk]:
    """Cut sorted pages of one file into runs of neighbours of at most a chunk."""
    step = pages_per_chunk(nbytes, buffers_per_page)
    breaks = (np.flatnonzero(np.diff(offsets) != nbytes) + 1).tolist()
    starts, order = offsets.tolist(), positions.tolist()
    chunks: list[Chunk] = []
    first = 0
    for stop in (*breaks, len(order)):
        for at in range(first, stop, step):
            end = min(at + step, stop)
            chunks.append(Chunk(fd, starts[at], order[at:end], None if sums is None else sums[at:end]))
        first = stop
    return chunks
