"""The catalog: what this process knows of its namespace, kept up with what others do.

It is built from the journals when an instance opens, when the epoch changes,
and when the ring of events was overtaken. In between it follows: events tell
of new, deleted and buried things, and a miss looks whether a foreign journal
has grown. One lock guards every change; looking a batch up takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from hicache_file._format import (
    BURIED,
    CREATED,
    DAMAGED,
    DELETED,
    Event,
    unpack_epoch_live,
)
from hicache_file._index import ABSENT, RECORD_BITS, RECORD_MASK, PageIndex, scratch
from hicache_file._journal import (
    CHECK,
    DIGEST_HIGH,
    DIGEST_LOW,
    FLAGS,
    HAS_SUM,
    LENGTH,
    Words,
)
from hicache_file._listing import GONE, list_headers, list_journal, most_records, passes
from hicache_file._records import read_records
from hicache_file._segment import Segment, read_growth
from hicache_file._space import Space

#: Entries of deleted segments are swept out once there are this many beyond a quarter of the index.
_SWEEP_FROM = 1 << 14


class Catalog:
    """Segments and index of one epoch.

    Verbs may still use a catalog that was replaced. It shares descriptors and ordinals with the one after it,
    and the segments that lanes of this instance have open, which count what was written; of every other one
    a catalog counts what its own index has taken in.
    """

    def __init__(
        self, space: Space, words: bytes, known: Sequence[Segment] = (), *, strict: bool = False
    ) -> None:
        self.space = space
        #: The epoch file's live words that this state agrees with; storage compares them on every verb.
        self.words = words
        self.epoch, self._head = unpack_epoch_live(words)
        self.index = PageIndex()
        self.lock = space.lock
        self.latest_sequence = 0
        self._by_id: dict[bytes, Segment] = {}
        self._by_ordinal: dict[int, Segment] = {}
        self._growing: list[Segment] = []
        self._gone: set[int] = set()
        self._stale = 0
        #: Counts how often pages of others were taken in, so that who searched before knows to search again.
        self._grown = 0
        #: Names of segments of another epoch that were met: anyone may unlink them.
        self.void: list[str] = []
        self._load({segment.header.id: segment for segment in known}, strict=strict)

    def segment(self, ordinal: int) -> Segment | None:
        """Give a segment by its ordinal; None when it is gone."""
        return self._by_ordinal.get(ordinal)

    def by_id(self, segment_id: bytes) -> Segment | None:
        """Give a live segment by its id."""
        return self._by_id.get(segment_id)

    def segments(self) -> list[Segment]:
        """List the live segments."""
        return list(self._by_id.values())

    def succeed(self, before: Catalog) -> None:
        """Give back the descriptors of segments that only the catalog before this one knew."""
        for segment in before.segments():
            if segment.header.id not in self._by_id and not segment.mine:
                self.space.handles.drop(segment.ordinal)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Give the place of each key, ABSENT where none is known; asks nobody."""
        found = self.index.find(digests)
        gone = self._gone
        if gone and not gone.isdisjoint({place >> RECORD_BITS for place in found}):
            with self.lock:
                for at, place in enumerate(found):
                    while place >> RECORD_BITS in self._gone:
                        self.index.remove(digests[at], place)
                        (place,) = self.index.find([digests[at]])
                    found[at] = place
        return found

    def look(self, digests: Sequence[bytes]) -> list[int]:
        """The same, looking for growth of foreign journals when something is missing (R7).

        Raises:
            OSError: something is missing, and a journal that may have it cannot be read at present.
        """
        grown = self._grown
        found = self.find(digests)
        if ABSENT in found:
            passing = self._look_at_growing()
            if self._grown != grown:  # by this thread or another
                found = self.find(digests)
            if passing is not None and ABSENT in found:
                raise passing
        return found

    def grow(self) -> int:
        """Take in what was appended to foreign journals; returns how many pages.

        Raises:
            OSError: some journal cannot be read at present; the others were.
        """
        added = 0
        passing: OSError | None = None
        with self.lock:
            for segment in list(self._growing):
                try:
                    handle = self.space.handles.take(segment)
                except (OSError, ValueError) as error:
                    if isinstance(error, ValueError) or error.errno in GONE:
                        self.forget(segment)
                    elif passes(error):
                        passing = error
                    continue
                try:
                    added += self._add(segment, read_growth(segment, handle.idx))
                except OSError as error:
                    passing = error if passes(error) else passing
                    continue
                finally:
                    self.space.handles.give(handle)
                if segment.final:
                    self._growing.remove(segment)
        if passing is not None:
            raise passing
        return added

    def _look_at_growing(self) -> OSError | None:
        if self._growing:
            try:
                self.grow()
            except OSError as error:
                return error
        return None

    def follow(self, words: bytes) -> bool:
        """Catch up with the events that ``words`` count; False when a new catalog has to be loaded.

        Raises:
            OSError: an event cannot be followed at present; it is the first one next time.
        """
        epoch, head = unpack_epoch_live(words)
        with self.lock:
            if epoch != self.epoch:
                return False
            events = self.space.epoch.events(self._head, head)
            if events is None:
                return False
            for event in events:
                self._apply(event)
                self._head += 1
            self.words = words
            return True

    def append(self, segment: Segment, digests: Sequence[bytes]) -> range:
        """Enter pages that this instance has just written behind what the segment had; gives their places."""
        with self.lock:
            first = segment.count
            start = segment.ordinal << RECORD_BITS | first
            places = range(start, start + len(digests))
            segment.count += len(digests)
            if segment.header.epoch == self.epoch:
                if segment.buried:
                    alive = [n for n in range(len(digests)) if first + n not in segment.buried]
                    self.index.insert([digests[n] for n in alive], [places[n] for n in alive])
                    segment.buried = {n for n in segment.buried if n >= segment.count}
                else:
                    self.index.insert(digests, places)
            return places

    def duplicates(self, digests: Sequence[bytes]) -> list[int]:
        """Give the positions of keys that have several live copies, after a look at foreign journals."""
        self._look_at_growing()
        spare = self.index.spare
        if not spare or spare.keys().isdisjoint(digests):
            return []
        return [position for position, digest in enumerate(digests) if digest in spare]

    def create(self, segment: Segment) -> None:
        """Enter a segment."""
        with self.lock:
            self._by_id[segment.header.id] = segment
            self._by_ordinal[segment.ordinal] = segment
            self.latest_sequence = max(self.latest_sequence, segment.header.sequence)

    def bury(self, digest: bytes, place: int, *, damaged: bool) -> bool:
        """Forget one copy of a key."""
        with self.lock:
            segment = self._by_ordinal.get(place >> RECORD_BITS)
            if segment is not None:
                segment.note_buried((place & RECORD_MASK,))
            return self.index.remove(digest, place, damaged=damaged)

    def copies(self, digest: bytes) -> list[int]:
        """Give every live copy of a key."""
        with self.lock:
            return [place for place in self.index.copies(digest) if place >> RECORD_BITS not in self._gone]

    def forget(self, segment: Segment) -> None:
        """A segment's files are gone: its entries no longer count."""
        with self.lock:
            known = self._by_id.get(segment.header.id)
            if known is None or known.ordinal != segment.ordinal:
                return
            del self._by_id[known.header.id]
            if known in self._growing:
                self._growing.remove(known)
            self._gone.add(known.ordinal)
            self._stale += known.count
            self.space.handles.drop(known.ordinal)
            if self._stale > _SWEEP_FROM + len(self.index) // 4:
                self._sweep()

    def _load(self, known: dict[bytes, Segment], *, strict: bool) -> None:
        headers = []
        for header in list_headers(self.space.folder, self.space.handles, strict=strict):
            if header.namespace == self.space.namespace:
                if header.epoch == self.epoch:
                    headers.append(header)
                else:
                    self.void.append(header.id.hex())
        headers.sort(key=attrgetter("sequence"))
        sizes = [most_records(self.space.folder, header) for header in headers]
        most = sum(sizes)
        first, second, places = (scratch(most, dtype) for dtype in (np.uint64, np.uint64, np.int64))
        count = 0
        buffer = bytearray(max((h.records_start for h in headers), default=0) + 64 * max(sizes, default=0))
        for header in headers:
            try:
                _, dead, records, final = list_journal(
                    self.space.folder, self.space.handles, header.id.hex(), buffer
                )
            except (OSError, ValueError) as error:
                if passes(error):
                    raise
                continue
            segment = self.space.own.get(header.id)
            if segment is None:
                before = known.get(header.id)
                segment = self.space.new_segment(header) if before is None else before.copy()
                segment.final, segment.count = final, len(records)
            numbers = self._take_in(segment, dead, records)
            numbers = numbers[: most - count]
            chosen = slice(count, count := count + len(numbers))
            kept = records if len(numbers) == len(records) else records[numbers]
            first[chosen] = kept[:, DIGEST_LOW]
            second[chosen] = kept[:, DIGEST_HIGH]
            np.add(numbers, segment.ordinal << RECORD_BITS, out=places[chosen])
        self.index.load(first[:count], second[:count], places[:count])

    def _take_in(self, segment: Segment, dead: bytes, records: Words) -> np.ndarray:
        """Enter a segment that was loaded; gives the numbers of its live records."""
        self.create(segment)
        if not segment.final and not segment.mine:
            self._growing.append(segment)
        alive = _usable(segment, records)
        flags = np.frombuffer(dead, np.uint8, len(records))
        if flags.any():
            segment.note_buried(np.flatnonzero(flags).tolist())
            self.index.damaged.update(_damaged(records, flags))
            alive &= flags == 0
        return np.flatnonzero(alive)

    def _add(self, segment: Segment, records: Words) -> int:
        count = len(records)
        if not count:
            return 0
        alive = np.flatnonzero(_usable(segment, records))
        raw = records[:, :CHECK].tobytes()
        start = segment.ordinal << RECORD_BITS | segment.count
        self.index.insert([raw[16 * n : 16 * n + 16] for n in alive], [start + n for n in alive.tolist()])
        segment.count += count
        self._grown += 1
        return count

    def _apply(self, event: Event) -> None:
        segment = self._by_id.get(event.id)
        own = self.space.own.get(event.id)
        if event.kind == CREATED and own is not None:
            self.create(own)
        elif event.kind == CREATED and segment is None:
            self._discover(event.id.hex())
        elif event.kind == DELETED and segment is not None:
            self.forget(segment)
        elif event.kind == BURIED and segment is not None:
            self._unearth(segment, event.value)

    def _discover(self, name: str) -> None:
        try:
            header, dead, records, final = list_journal(self.space.folder, self.space.handles, name)
        except (OSError, ValueError) as error:
            if passes(error):
                raise
            return
        if header.epoch != self.epoch or header.namespace != self.space.namespace:
            return
        segment = self.space.new_segment(header)
        segment.final = final
        self.create(segment)
        flags = np.frombuffer(dead, np.uint8, len(records))
        numbers = np.flatnonzero(_usable(segment, records) & (flags == 0)).tolist()
        raw = records[:, :CHECK].tobytes()
        start = segment.ordinal << RECORD_BITS
        self.index.insert([raw[16 * n : 16 * n + 16] for n in numbers], [start + n for n in numbers])
        segment.count = len(records)
        self.index.damaged.update(_damaged(records, flags))
        self._grown += 1
        if not final:
            self._growing.append(segment)

    def _unearth(self, segment: Segment, value: int) -> None:
        """Somebody buried a record of this segment."""
        number, damaged = value >> 8, value & 0xFF == DAMAGED
        segment.note_buried((number,))
        try:
            handle = self.space.handles.take(segment)
        except (OSError, ValueError) as error:
            if passes(error):
                raise
            self.forget(segment)
            return
        try:
            if number >= segment.count and not segment.mine:
                self._add(segment, read_growth(segment, handle.idx))
            (record,) = read_records(segment, handle.idx, number, number)
        except OSError as error:
            if passes(error):
                raise
            self.forget(segment)  # or a later look would take the record in
            return
        except ValueError:
            return
        finally:
            self.space.handles.give(handle)
        self.index.remove(record[:CHECK].tobytes(), segment.ordinal << RECORD_BITS | number, damaged=damaged)

    def _sweep(self) -> None:
        """Drop every entry of a segment that is gone."""
        gone, self._stale = self._gone, 0
        self.index.merge(gone)
        self._gone = set()
        for ordinal in gone:
            self._by_ordinal.pop(ordinal, None)

    def usage(self) -> tuple[int, int]:
        """Count the namespace's pages and their bytes, a key once."""
        with self.lock:
            self._sweep()
            places = self.index.live_places()
            ordinals = places >> RECORD_BITS
            pages = nbytes = 0
            for ordinal in np.unique(ordinals).tolist():
                segment = self._by_ordinal[ordinal]
                numbers = places[ordinals == ordinal] & RECORD_MASK
                try:
                    handle = self.space.handles.take(segment)
                    try:
                        records = read_records(segment, handle.idx, 0, int(numbers.max()))
                    finally:
                        self.space.handles.give(handle)
                except (FileNotFoundError, ValueError):
                    self.forget(segment)
                    continue
                pages += len(numbers)
                nbytes += int(records[numbers, LENGTH].sum())
            return pages, nbytes


def _damaged(records: Words, flags: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in records[flags == DAMAGED, :CHECK]]


def _usable(segment: Segment, records: Words) -> np.ndarray:
    """Leave out what a crash of the machine may have damaged unseen (R9)."""
    if segment.verify:
        return (records[:, FLAGS] & np.uint64(HAS_SUM)) != 0
    return np.ones(len(records), bool)
