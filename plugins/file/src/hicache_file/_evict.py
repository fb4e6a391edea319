"""Making room: the oldest sealed segment goes, what was used in it gets a second chance (R5, R6).

The victim is the sealed segment with the lowest sequence in the whole root.
Before it is unlinked, its marked pages, the latest used first and at most half
of its bytes, are copied into one new segment that is whole from the moment it
has a journal. Each step may be the last one that this process takes:

1. the new .seg is written            a crash leaves half a segment: the next count removes it
2. its .idx is renamed into place     pages are there twice, which is harmless
3. the events are published           others look at the new one, and forget the old one
4. the old .idx, then .seg, unlinked  half a segment again

Victims are listed once and then used up in order: whatever is created later has
a higher sequence than all of them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash

from hicache_file._budget import Ledger, RootFile, is_open, namespaces, pair_nbytes, remove_pair, scan_folder
from hicache_file._epoch import EpochFile
from hicache_file._files import Folder, write_exactly
from hicache_file._format import (
    CREATED,
    DAMAGED,
    DELETED,
    BadHeader,
    Event,
    SegmentHeader,
    data_start,
    pack_journal_head,
    pack_segment_head,
)
from hicache_file._journal import FLAGS, HAS_SUM, LENGTH, OFFSET, SUM, Words, reseal
from hicache_file._segment import open_pair, read_header, read_journal

#: Waiting for a namespace's lock while the root's is held.
_LOCK_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, order=True)
class Victim:
    """A segment that may be evicted."""

    sequence: int
    namespace: str
    name: str


class Evictor:
    """Finds and removes victims; used under the root's lock only."""

    def __init__(self, root: RootFile, fsync: bool) -> None:
        self._root = root
        self._fsync = fsync
        self._victims: deque[Victim] = deque()
        self._folder: tuple[str, Folder, EpochFile | None] | None = None

    def make_room(self, ledger: Ledger, nbytes: int, floor: int) -> None:
        """Evict until nbytes more fit the budget; nothing without one.

        Args:
            floor: segments of this sequence and above stay (0: none such).

        Raises:
            OSError: ENOSPC when nothing is left to evict.
        """
        listed = False
        while ledger.capacity and ledger.used + nbytes > ledger.capacity:
            victim = self._next(ledger, floor)
            if victim is None and not listed:
                self._victims = deque(self._list(ledger))
                listed = True
            elif victim is None:
                raise OSError(28, "nothing is left to evict")
            else:
                self._evict(ledger, victim)

    def close(self) -> None:
        """Give descriptors back."""
        if self._folder is not None:
            self._folder[1].close()
            if self._folder[2] is not None:
                self._folder[2].close()
            self._folder = None

    def _next(self, ledger: Ledger, floor: int) -> Victim | None:
        """Take the next victim that is sealed and still there."""
        while self._victims:
            victim = self._victims[0]
            if floor and victim.sequence >= floor:
                return None
            self._victims.popleft()
            if not ledger.is_registered(bytes.fromhex(victim.name)):
                return victim
        return None

    def _list(self, ledger: Ledger) -> list[Victim]:
        ledger.reap()
        victims: list[Victim] = []
        for namespace in namespaces(self._root.folder):
            try:
                folder = self._root.folder.folder(namespace)
            except OSError:
                continue
            try:
                for name in scan_folder(folder).segments:
                    try:
                        sequence = read_header(folder, name).sequence
                    except BadHeader:
                        sequence = 0  # of no use to anybody
                    except (OSError, ValueError):
                        continue
                    victims.append(Victim(sequence, namespace, name))
            finally:
                folder.close()
        return sorted(victims)

    def _evict(self, ledger: Ledger, victim: Victim) -> None:
        with self._opened(victim.namespace) as (folder, epoch):
            before = pair_nbytes(folder, victim.name)
            if not before or is_open(folder, victim.name):
                return
            ledger.begin()
            if epoch is not None:
                try:
                    self._rescue(ledger, folder, epoch, victim)
                except (OSError, ValueError):
                    pass  # a full disk, a damaged journal: its pages go without a second chance
            remove_pair(folder, victim.name)
            ledger.used += pair_nbytes(folder, victim.name) - before

    @contextmanager
    def _opened(self, namespace: str) -> Iterator[tuple[Folder, EpochFile | None]]:
        """Open a namespace's folder and epoch file; the last one is kept open."""
        if self._folder is None or self._folder[0] != namespace:
            self.close()
            folder = self._root.folder.folder(namespace)
            epoch = None
            try:
                epoch = EpochFile.open(folder, bytes.fromhex(namespace), writable=True)
            except (OSError, ValueError):
                pass  # nobody can read this namespace: its segments only take room
            self._folder = (namespace, folder, epoch)
        yield self._folder[1:]

    def _rescue(self, ledger: Ledger, folder: Folder, epoch: EpochFile, victim: Victim) -> None:
        """Give the victim's marked pages a second chance and tell others; a void segment has none."""
        header, dead, records, _ = read_journal(folder, victim.name)
        current, _ = epoch.state()
        events = [Event(DELETED, header.id, 0)]
        moved: SegmentHeader | None = None
        if header.epoch == current and len(records):
            moved = self._move(ledger, folder, epoch, header, dead, records)
        if moved is not None:
            events.insert(0, Event(CREATED, moved.id, moved.sequence))
        with epoch.lock.held(_LOCK_TIMEOUT_S):
            epoch.append(events, current)

    def _move(
        self,
        ledger: Ledger,
        folder: Folder,
        epoch: EpochFile,
        header: SegmentHeader,
        dead: bytes,
        records: Words,
    ) -> SegmentHeader | None:
        seg, idx = open_pair(folder, header, writable=False)
        try:
            use = np.frombuffer(os.pread(idx, len(records), header.use_start), np.uint8)
            alive = np.frombuffer(dead, np.uint8) == 0
            chosen = choose(records[:, LENGTH], np.where(alive[: len(use)], use, 0))
            if not len(chosen):
                return None
            kept = records[chosen]
            start = data_start(int(kept[:, LENGTH].sum()))
            fresh = SegmentHeader(
                id=os.urandom(16),
                namespace=header.namespace,
                boot=self._root.boot,
                sequence=ledger.draw_sequence(),
                epoch=header.epoch,
                room=-(-len(kept) // 64) * 64,
                data_start=start,
                nbytes=start + int(kept[:, LENGTH].sum()),
                created_ns=time.time_ns(),
                synced=self._fsync,
            )
            damaged = self._copy(folder, fresh, seg, kept)
            return self._publish(ledger, folder, epoch, fresh, header, idx, chosen, kept, damaged)
        finally:
            os.close(seg)
            os.close(idx)

    def _copy(self, folder: Folder, fresh: SegmentHeader, source: int, kept: Words) -> np.ndarray:
        """Copy page bytes as they are; tells which of them do not match their old checksum."""
        damaged = np.zeros(len(kept), bool)
        target = folder.open(f"{fresh.id.hex()}.seg", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            write_exactly(target, pack_segment_head(fresh.id, fresh.namespace), 0)
            end = fresh.data_start
            columns = (kept[:, n].tolist() for n in (OFFSET, LENGTH, SUM, FLAGS))
            for number, (offset, length, total, flags) in enumerate(zip(*columns, strict=True)):
                page = os.pread(source, length, offset)
                if flags & HAS_SUM:
                    damaged[number] = xxhash.xxh3_64_intdigest(page) != total
                damaged[number] |= len(page) != length
                write_exactly(target, page.ljust(length, b"\0"), end)
                end += length
            if self._fsync:
                os.fdatasync(target)
        finally:
            os.close(target)
        return damaged

    def _publish(
        self,
        ledger: Ledger,
        folder: Folder,
        epoch: EpochFile,
        fresh: SegmentHeader,
        old: SegmentHeader,
        old_idx: int,
        chosen: np.ndarray,
        kept: Words,
        damaged: np.ndarray,
    ) -> SegmentHeader | None:
        """Rename the journal into place, unless the namespace was cleared meanwhile; removals meanwhile are kept."""
        name = fresh.id.hex()
        with epoch.lock.held(_LOCK_TIMEOUT_S):
            current, _ = epoch.state()
            if current != old.epoch:
                folder.remove(f"{name}.seg")
                return None
            dead = np.zeros(fresh.room, np.uint8)
            buried = np.frombuffer(os.pread(old_idx, int(chosen[-1]) + 1, old.dead_start), np.uint8)
            dead[: len(kept)] = np.where(damaged, DAMAGED, buried[chosen])
            records = reseal(kept, fresh.id, fresh.data_start)
            raw = pack_journal_head(fresh) + dead.tobytes() + bytes(fresh.room) + records.tobytes()
            idx = folder.open(f"{name}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                write_exactly(idx, raw, 0)
                if self._fsync:
                    os.fdatasync(idx)
            finally:
                os.close(idx)
            folder.rename(f"{name}.new", f"{name}.idx")
            if self._fsync:
                folder.sync()
        ledger.used += pair_nbytes(folder, name)
        return fresh


def choose(lengths: np.ndarray, use: np.ndarray) -> np.ndarray:
    """Pick marked pages, the latest used first, up to half of the segment's bytes but one at least; in file order."""
    marked = np.flatnonzero(use)
    if not len(marked):
        return marked
    latest = marked[np.argsort(-use[marked].astype(np.int16), kind="stable")]
    sizes = np.cumsum(lengths[latest].astype(np.int64))
    count = max(1, int(np.searchsorted(sizes, int(lengths.sum()) // 2, side="right")))
    return np.sort(latest[:count])
