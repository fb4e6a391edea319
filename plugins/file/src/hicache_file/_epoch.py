"""The epoch file of a namespace: what every verb compares, and a ring of recent changes (R6, R8).

24 live bytes, read with one pread a verb: the epoch, which clear() raises, and
the count of events so far. An event says that a segment was created or deleted,
or that one record of a segment was buried (removed, or found damaged); the ring
keeps the last few hundred, so that a process follows the others without
listing the folder, and lists it when it has fallen too far behind.

Read with pread and never mapped: a file that somebody cuts short gives a short
read instead of a signal. Readers take no lock; the check word tells a torn
read, which is read again under the lock. A new or healed file begins at the
clock's nanoseconds, so that no epoch ever comes back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from hicache_file._files import FileLock, Folder, read_exactly, write_exactly
from hicache_file._format import (
    EPOCH_FILE,
    EPOCH_LIVE_NBYTES,
    EVENT_NBYTES,
    LIVE_OFFSET,
    TABLE_OFFSET,
    BadHeader,
    Event,
    pack_epoch_head,
    pack_epoch_live,
    pack_event,
    unpack_epoch_head,
    unpack_epoch_live,
    unpack_event,
)

#: Events in a ring; a small one where the budget is small.
RING_SLOTS, SMALL_RING_SLOTS = 512, 32
SMALL_CAPACITY_NBYTES = 16 << 20
#: Waiting for a namespace's lock while the root's is held.
_HEALING_TIMEOUT_S = 2.0


class EpochFile:
    """One namespace's epoch file, open; ``lock`` is the namespace's lock."""

    __slots__ = ("_namespace", "_slots", "_sound", "fd", "lock")

    def __init__(self, fd: int, namespace: bytes) -> None:
        self.fd = fd
        self._namespace = namespace
        self.lock = FileLock(fd, f"the namespace {namespace.hex()}")
        self._slots = SMALL_RING_SLOTS
        #: False while the head is damaged, and the file's size tells the ring's; ``settled_state`` heals it.
        self._sound = False
        raw = read_exactly(fd, TABLE_OFFSET, 0)
        try:
            self._slots, _ = unpack_epoch_head(raw)
            self._sound = True
        except BadHeader:
            if os.fstat(fd).st_size == _nbytes(RING_SLOTS):
                self._slots = RING_SLOTS

    @classmethod
    def open(cls, folder: Folder, namespace: bytes, *, writable: bool) -> EpochFile:
        """Open an existing file.

        Raises:
            OSError; UnknownVersion.
        """
        fd = folder.open(EPOCH_FILE, os.O_RDWR if writable else os.O_RDONLY)
        try:
            return cls(fd, namespace)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def make(cls, folder: Folder, namespace: bytes, capacity: int) -> EpochFile:
        """Open the file, made whole first where it is missing; the root's lock is held."""
        try:
            return cls.open(folder, namespace, writable=True)._healed()
        except FileNotFoundError:
            pass
        slots = SMALL_RING_SLOTS if 0 < capacity < SMALL_CAPACITY_NBYTES else RING_SLOTS
        scratch = f"{EPOCH_FILE}.new"
        folder.remove(scratch)
        fd = folder.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(fd, _nbytes(slots))
            write_exactly(fd, pack_epoch_head(namespace, slots) + pack_epoch_live(time.time_ns(), 0), 0)
            folder.rename(scratch, EPOCH_FILE)
            return cls(fd, namespace)
        except BaseException:
            os.close(fd)
            raise

    def words(self) -> bytes:
        """Read the live words; equal bytes mean that nothing has changed."""
        return os.pread(self.fd, EPOCH_LIVE_NBYTES, LIVE_OFFSET)

    def state(self) -> tuple[int, int]:
        """Read (epoch, number of events).

        Raises:
            BadHeader: torn by a writer at work, or damaged: ask again under the lock, then heal.
        """
        return unpack_epoch_live(self.words())

    def settled_state(self, at_least: int) -> tuple[int, int]:
        """Read the state under the lock, which the caller holds; a damaged file begins a new epoch.

        Args:
            at_least: the highest epoch known; a healed file's is above it.
        """
        if not self._sound:
            self.look_again()
        try:
            state = self.state()
            if self._sound:
                return state
            if os.fstat(self.fd).st_size == _nbytes(self._slots):
                write_exactly(self.fd, pack_epoch_head(self._namespace, self._slots), 0)
                self._sound = True
                return state
            at_least = max(at_least, state[0])  # nobody knows how others count its ring
        except BadHeader:
            pass
        epoch = max(time.time_ns(), at_least + 1)
        os.ftruncate(self.fd, _nbytes(self._slots))
        write_exactly(self.fd, pack_epoch_head(self._namespace, self._slots) + pack_epoch_live(epoch, 0), 0)
        self._sound = True
        return epoch, 0

    def look_again(self) -> None:
        """Read the head again: with a new epoch the ring may have got another size."""
        try:
            self._slots, _ = unpack_epoch_head(read_exactly(self.fd, TABLE_OFFSET, 0))
            self._sound = True
        except ValueError:
            pass  # as it was known before

    def _healed(self) -> EpochFile:
        """See to a damaged head before others come to count the ring by it."""
        if not self._sound:
            try:
                with self.lock.held(_HEALING_TIMEOUT_S):
                    self.settled_state(0)
            except BaseException:
                self.close()
                raise
        return self

    def append(self, events: Sequence[Event], at_least: int) -> int:
        """Publish events; the lock is held. Returns the epoch that they belong to."""
        epoch, head = self.settled_state(at_least)
        for number, event in enumerate(events, head):
            write_exactly(
                self.fd, pack_event(event, number), TABLE_OFFSET + number % self._slots * EVENT_NBYTES
            )
        write_exactly(self.fd, pack_epoch_live(epoch, head + len(events)), LIVE_OFFSET)
        return epoch

    def advance(self, at_least: int) -> int:
        """Begin a new epoch: everything stored so far is void; the lock is held."""
        epoch, head = self.settled_state(at_least)
        write_exactly(self.fd, pack_epoch_live(epoch + 1, head), LIVE_OFFSET)
        return epoch + 1

    def events(self, start: int, stop: int) -> list[Event] | None:
        """Read events [start, stop); None when some are overwritten: list the folder instead."""
        if stop - start > self._slots or stop < start:
            return None
        found: list[Event] = []
        try:
            for number in range(start, stop):
                raw = os.pread(self.fd, EVENT_NBYTES, TABLE_OFFSET + number % self._slots * EVENT_NBYTES)
                found.append(unpack_event(raw, number))
            _, head = self.state()
        except BadHeader:
            return None
        return found if head - start <= self._slots else None

    def close(self) -> None:
        """Give the descriptor back; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _nbytes(slots: int) -> int:
    """Tell the size of a file with a ring of so many events."""
    return TABLE_OFFSET + slots * EVENT_NBYTES
