"""The second chance: copying used pages out of segments that are about to be unlinked (R6).

Page bytes are copied as they are, with the checksum that they have: a page that
was damaged, in the old file or on the way, stays damaged, and a new checksum
would hide it. A page found damaged is copied all the same and flagged, so that
it is CORRUPT and not a miss.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import xxhash

from hicache_file._budget import Ledger, RootFile, pair_nbytes
from hicache_file._epoch import EpochFile
from hicache_file._files import Folder, write_exactly
from hicache_file._format import (
    CREATED,
    DAMAGED,
    JOURNAL_HEAD_NBYTES,
    RECORD_NBYTES,
    REMOVED,
    Event,
    SegmentHeader,
    pack_journal_head,
    unpack_journal_head,
)
from hicache_file._journal import FLAGS, HAS_SUM, LENGTH, OFFSET, SUM, WORDS, Words, parse, reseal

#: Waiting for the namespace's lock while the root's is held.
_LOCK_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Source:
    """A segment that is about to go."""

    header: SegmentHeader
    records: Words
    last_use: np.ndarray
    """For each record the sequence at its last use, 0 where it was never used or is dead."""
    nbytes: int
    """Bytes of its pages, about."""
    seg: int
    idx: int

    @classmethod
    def open(cls, folder: Folder, name: str) -> Source:
        """Read a segment's marks, and its records where some are marked.

        Raises:
            OSError, ValueError.
        """
        idx = folder.open(f"{name}.idx", os.O_RDWR)
        seg = -1
        try:
            header = unpack_journal_head(os.pread(idx, JOURNAL_HEAD_NBYTES, 0))
            use = np.frombuffer(os.pread(idx, header.room, header.use_start), np.uint8)
            nbytes = folder.size(f"{name}.seg")
            if header.id.hex() != name or not use.any():
                return cls(header, np.empty((0, WORDS), np.uint64), np.empty(0, np.int64), nbytes, seg, idx)
            seg = folder.open(f"{name}.seg")
            raw = os.pread(idx, header.room * RECORD_NBYTES, header.records_start)
            records = parse(raw, header.id)
            count = len(records)
            use = np.frombuffer(use.tobytes()[:count].ljust(count, b"\0"), np.uint8)
            alive = np.frombuffer(os.pread(idx, count, header.dead_start), np.uint8) == 0
            if os.fstat(seg).st_ino != header.inode:
                alive &= (records[:, FLAGS] & np.uint64(HAS_SUM)) != 0
            last_use = np.where((use > 0) & alive, use.astype(np.int64) + header.sequence, 0)
            return cls(header, records, last_use, nbytes, seg, idx)
        except BaseException:
            for fd in (seg, idx):
                if fd >= 0:
                    os.close(fd)
            raise

    def dead(self, numbers: np.ndarray) -> np.ndarray:
        """Read the dead bytes of some records anew."""
        return np.frombuffer(os.pread(self.idx, int(numbers[-1]) + 1, self.header.dead_start), np.uint8)[
            numbers
        ]

    def void(self) -> None:
        """Declare every record dead, for whoever reads the journal before its file is gone.

        Raises:
            OSError.
        """
        write_exactly(self.idx, bytes([REMOVED]) * self.header.room, self.header.dead_start)

    def close(self) -> None:
        """Give the descriptors back."""
        for fd in (self.seg, self.idx):
            if fd >= 0:
                os.close(fd)


def choose(lengths: np.ndarray, last_use: np.ndarray, most_nbytes: int) -> np.ndarray:
    """Pick used pages, the latest first, up to so many bytes but one page at least; ascending numbers."""
    used = np.flatnonzero(last_use)
    if not len(used):
        return used
    latest = used[np.argsort(-last_use[used], kind="stable")]
    sizes = np.cumsum(lengths[latest].astype(np.int64))
    count = max(1, int(np.searchsorted(sizes, most_nbytes, side="right")))
    return np.sort(latest[:count])


def rescue(
    root: RootFile,
    ledger: Ledger,
    folder: Folder,
    epoch: EpochFile,
    sources: Sequence[Source],
    limit: int,
    *,
    fsync: bool,
) -> Iterator[list[Source]]:
    """Copy what is worth it into segments of at most ``limit`` page bytes; yields sources that are done with.

    They come as early as possible, so that unlinking them keeps the root within its budget.

    Raises:
        OSError, ValueError: nothing half made is left.
    """
    ends = np.cumsum([0, *(len(source.records) for source in sources)])
    lengths = np.concatenate([source.records[:, LENGTH] for source in sources])
    half = sum(source.nbytes for source in sources) // 2
    chosen = choose(lengths, np.concatenate([source.last_use for source in sources]), half)
    shares = [chosen[(chosen >= a) & (chosen < b)] - a for a, b in pairwise(ends.tolist())]
    yield [source for source, share in zip(sources, shares, strict=True) if not len(share)]
    pending: list[tuple[Source, np.ndarray]] = []
    nbytes = 0
    for source, share in zip(sources, shares, strict=True):
        if not len(share):
            continue
        size = int(source.records[share, LENGTH].sum())
        if pending and nbytes + size > limit:
            _flush(root, ledger, folder, epoch, pending, fsync=fsync)
            yield [done for done, _ in pending]
            pending, nbytes = [], 0
        pending.append((source, share))
        nbytes += size
    if pending:
        _flush(root, ledger, folder, epoch, pending, fsync=fsync)
        yield [done for done, _ in pending]


def _flush(
    root: RootFile,
    ledger: Ledger,
    folder: Folder,
    epoch: EpochFile,
    pending: Sequence[tuple[Source, np.ndarray]],
    *,
    fsync: bool,
) -> None:
    """Make one sealed segment of the pages chosen, and publish it."""
    kept = np.concatenate([source.records[share] for source, share in pending])
    nbytes = int(kept[:, LENGTH].sum())
    old = pending[0][0].header
    fresh = SegmentHeader(
        id=os.urandom(16),
        namespace=old.namespace,
        boot=root.boot,
        sequence=ledger.draw_sequence(),
        epoch=old.epoch,
        room=-(-len(kept) // 64) * 64,
        nbytes=nbytes,
        created_ns=time.time_ns(),
        inode=0,
        synced=fsync,
    )
    name = fresh.id.hex()
    try:
        damaged, inode = _copy(folder, fresh, pending, fsync=fsync)
        fresh = replace(fresh, inode=inode)
        with epoch.lock.held(_LOCK_TIMEOUT_S):
            current, _ = epoch.state()
            if current != old.epoch:
                folder.remove(f"{name}.seg")
                return
            dead = np.concatenate([source.dead(share) for source, share in pending])
            dead = np.where(damaged & (dead == 0), DAMAGED, dead).astype(np.uint8)
            _write_journal(folder, fresh, dead, reseal(kept, fresh.id), fsync=fsync)
            epoch.append([Event(CREATED, fresh.id, fresh.sequence)], old.epoch)
    except BaseException:
        for ending in ("new", "idx", "seg"):
            folder.remove(f"{name}.{ending}")
        raise
    ledger.used += pair_nbytes(folder, name)


def _copy(
    folder: Folder, fresh: SegmentHeader, pending: Sequence[tuple[Source, np.ndarray]], *, fsync: bool
) -> tuple[np.ndarray, int]:
    """Copy page bytes as they are; tells which do not match their checksum, and the new file's inode."""
    damaged: list[bool] = []
    target = folder.open(f"{fresh.id.hex()}.seg", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        inode = os.fstat(target).st_ino
        end = 0
        for source, share in pending:
            rows = source.records[share]
            columns = [rows[:, n].tolist() for n in (OFFSET, LENGTH, SUM, FLAGS)]
            for offset, length, total, flags in zip(*columns, strict=True):
                page = os.pread(source.seg, length, offset)
                wrong = len(page) != length or (flags & HAS_SUM and xxhash.xxh3_64_intdigest(page) != total)
                damaged.append(bool(wrong))
                write_exactly(target, page.ljust(length, b"\0"), end)
                end += length
        if fsync:
            os.fdatasync(target)
    finally:
        os.close(target)
    return np.array(damaged, bool), inode


def _write_journal(
    folder: Folder, fresh: SegmentHeader, dead: np.ndarray, records: Words, *, fsync: bool
) -> None:
    """Rename a whole journal into place."""
    name = fresh.id.hex()
    marks = dead.tobytes().ljust(fresh.room, b"\0") + bytes(fresh.room)
    idx = folder.open(f"{name}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        write_exactly(idx, pack_journal_head(fresh) + marks + records.tobytes(), 0)
        if fsync:
            os.fdatasync(idx)
    finally:
        os.close(idx)
    folder.rename(f"{name}.new", f"{name}.idx")
    if fsync:
        folder.sync()
