"""Segments as readers see them, and the counted descriptors behind them (R1, R7).

A ``Segment`` is knowledge: header, how many records are known, what was marked.
A ``Handle`` is two open files. Handles are kept, bounded, and shared: a verb
takes one, reads, and gives it back; it is closed when the last one has given it
back and nobody wants it kept, so no descriptor number is ever closed under a
read. A deleted segment stays readable through the handle that holds it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import copy
from typing import TypeVar

import numpy as np

from hicache_file._files import Folder, lock_shared
from hicache_file._format import (
    JOURNAL_HEAD_NBYTES,
    LARGEST_JOURNAL_NBYTES,
    RECORD_NBYTES,
    BadHeader,
    SegmentHeader,
    unpack_journal_head,
)
from hicache_file._janitor import Janitor
from hicache_file._journal import WORDS, Words, parse

Opened = TypeVar("Opened")

#: Journal bytes read at once when looking for growth: 64 records.
_GROWTH_NBYTES = 4096


class Segment:
    """What one catalog knows of one segment; catalogs share those that a lane of this instance has open."""

    __slots__ = (
        "buried",
        "count",
        "final",
        "header",
        "marks",
        "mine",
        "name",
        "ordinal",
        "reusable",
        "table",
        "verify",
    )

    def __init__(self, header: SegmentHeader, ordinal: int, boot: bytes) -> None:
        self.header = header
        self.ordinal = ordinal
        self.name = header.id.hex()
        #: Records known.
        self.count = 0
        #: Numbers of records that our lane has written, and somebody buried, before ``append`` counts them.
        self.buried: set[int] = set()
        #: True once its journal cannot grow any more.
        self.final = False
        #: True while a lane of this instance appends to it.
        self.mine = False
        #: True where this instance made it, in a way that lets it be taken over once it is evicted.
        self.reusable = False
        #: Records in memory, for our own open segments only.
        self.table: Words | None = None
        #: What this process has written to the use bytes; allocated on first use.
        self.marks: np.ndarray | None = None
        #: True where a power loss may have kept records and lost pages: verify, or do not read (R9).
        self.verify = not header.synced and header.boot != boot

    def copy(self) -> Segment:
        """Give the same segment to another catalog, which has to count its records itself."""
        other = copy(self)
        other.buried, other.count, other.final = set(), 0, False
        return other

    def note_buried(self, numbers: Iterable[int]) -> None:
        """Remember records of ours that are dead before they are counted; the catalog's lock is held."""
        if self.mine:
            self.buried.update(number for number in numbers if number >= self.count)


class Handle:
    """A segment's two open files, with a count of those who use them."""

    __slots__ = ("genuine", "idx", "kept", "ordinal", "seg", "users")

    def __init__(self, segment: Segment, seg: int, idx: int) -> None:
        self.ordinal = segment.ordinal
        #: False for a .seg file that is not the one that was created: a copy, or somebody's.
        self.genuine = os.fstat(seg).st_ino == segment.header.inode
        self.seg = seg
        self.idx = idx
        self.users = 0
        #: True while the cache holds it.
        self.kept = True


class Handles:
    """A bounded cache of handles.

    Args:
        folder: the namespace's folder.
        limit: how many handles are kept while unused.
        janitor: closes files of deleted segments.
        writable: whether journals are opened for writing (use and dead bytes).
    """

    def __init__(self, folder: Folder, limit: int, janitor: Janitor, *, writable: bool) -> None:
        self._folder = folder
        self.janitor = janitor
        self._limit = limit
        self._writable = writable
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Handle] = OrderedDict()
        self._lent: set[Handle] = set()

    def take(self, segment: Segment) -> Handle:
        """Open a segment, or share what is open; give it back with ``give``.

        Raises:
            OSError: ENOENT, ESTALE when the segment is gone, EMFILE, EACCES; BadHeader: not this one.
        """
        with self._lock:
            handle = self._kept.get(segment.ordinal)
            if handle is not None:
                self._kept.move_to_end(segment.ordinal)
                self._lend(handle)
                return handle
        seg, idx = self.retry_when_full(lambda: open_pair(self._folder, segment.header, self._writable))
        with self._lock:
            handle = self._kept.get(segment.ordinal)
            if handle is not None:
                os.close(seg)
                os.close(idx)
            else:
                handle = self._keep(Handle(segment, seg, idx))
            self._lend(handle)
            return handle

    def adopt(self, segment: Segment, seg: int, idx: int) -> Handle:
        """Keep files that the writer has opened itself; counts as taken."""
        with self._lock:
            handle = self._keep(Handle(segment, seg, idx))
            self._lend(handle)
            return handle

    def give(self, handle: Handle) -> None:
        """Give a handle back."""
        with self._lock:
            handle.users -= 1
            if not handle.users:
                self._lent.discard(handle)
                if not handle.kept:
                    self._close_soon(handle)

    def drop(self, ordinal: int) -> None:
        """Keep a segment's files no longer; they close once nobody uses them."""
        with self._lock:
            handle = self._kept.pop(ordinal, None)
            if handle is not None:
                handle.kept = False
                if not handle.users:
                    self._close_soon(handle)

    def let_go(self, ordinal: int) -> bool:
        """Close a segment's files now, unless somebody reads them; False, and nothing done, in that case."""
        with self._lock:
            handle = self._kept.get(ordinal)
            if handle is not None and handle.users:
                return False
            if handle is not None:
                self._unkeep(self._kept.pop(ordinal))
            return True

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            while self._kept:
                self._unkeep(self._kept.popitem()[1])

    def close_in_child(self) -> None:
        """Close every descriptor in a fork's child, where the lock may be held by nobody."""
        for handle in {*self._kept.values(), *self._lent}:
            _close(handle)
        self._kept.clear()

    def open_files(self) -> int:
        """Count open descriptors, for tests and doctors."""
        with self._lock:
            return 2 * len({*self._kept.values(), *self._lent})

    def make_room(self) -> int:
        """Close every file that nobody uses, for when the process is out of descriptors; how many handles."""
        with self._lock:
            idle = [ordinal for ordinal, handle in self._kept.items() if not handle.users]
            for ordinal in idle:
                self._unkeep(self._kept.pop(ordinal))
            return len(idle)

    def retry_when_full(self, opening: Callable[[], Opened]) -> Opened:
        """Open something, once more with every idle file closed where the process is out of descriptors."""
        try:
            return opening()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self.make_room():
                raise
        return opening()

    def _keep(self, handle: Handle) -> Handle:
        self._kept[handle.ordinal] = handle
        if len(self._kept) > self._limit:
            for ordinal, oldest in self._kept.items():
                if not oldest.users and oldest is not handle:
                    del self._kept[ordinal]
                    self._unkeep(oldest)
                    break
        return handle

    def _lend(self, handle: Handle) -> None:
        handle.users += 1
        self._lent.add(handle)

    def _close_soon(self, handle: Handle) -> None:
        """Close a deleted segment's files, which frees its page cache, behind everybody's back."""
        fds, handle.seg, handle.idx = (handle.seg, handle.idx), -1, -1
        self.janitor.do(lambda: _close_all(fds))

    def _unkeep(self, handle: Handle) -> None:
        handle.kept = False
        if not handle.users:
            _close(handle)


def _close(handle: Handle) -> None:
    fds, handle.seg, handle.idx = (handle.seg, handle.idx), -1, -1
    _close_all(fds)


def _close_all(fds: tuple[int, int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def open_pair(folder: Folder, header: SegmentHeader, writable: bool) -> tuple[int, int]:
    """Open a segment's two files and check that the journal is the one that it was.

    The journal's shared lock is what keeps an evictor from taking the segment over while this is open.
    """
    name = header.id.hex()
    seg = folder.open(f"{name}.seg")
    try:
        idx = folder.open(f"{name}.idx", os.O_RDWR if writable else os.O_RDONLY)
    except BaseException:
        os.close(seg)
        raise
    try:
        if not lock_shared(idx) or not os.fstat(idx).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "evicted", name)
        if unpack_journal_head(os.pread(idx, JOURNAL_HEAD_NBYTES, 0)) != header:
            raise BadHeader("another journal under this name")
    except BaseException:
        os.close(seg)
        os.close(idx)
        raise
    return seg, idx


def read_header(folder: Folder, name: str) -> SegmentHeader:
    """Read the header of ``<name>.idx``.

    Raises:
        OSError, BadHeader, UnknownVersion.
    """
    fd = folder.open(f"{name}.idx")
    try:
        return _named(unpack_journal_head(os.pread(fd, JOURNAL_HEAD_NBYTES, 0)), name)
    finally:
        os.close(fd)


def read_journal(
    folder: Folder, name: str, buffer: bytearray | None = None
) -> tuple[SegmentHeader, bytes, Words, bool]:
    """Read a whole journal: header, dead bytes, good records, and whether it ends there for good.

    Args:
        buffer: used again for each of many journals; the records are valid until the next one.

    Raises:
        OSError, BadHeader, UnknownVersion.
    """
    fd = folder.open(f"{name}.idx")
    try:
        size = min(os.fstat(fd).st_size, LARGEST_JOURNAL_NBYTES)
        if buffer is None or len(buffer) < size:
            buffer = bytearray(size)
        raw = memoryview(buffer)[: os.preadv(fd, [memoryview(buffer)[:size]], 0)]
    finally:
        os.close(fd)
    header = _named(unpack_journal_head(bytes(raw[:JOURNAL_HEAD_NBYTES])), name)
    records = parse(raw[header.records_start :], header.id)
    dead = bytes(raw[header.dead_start : header.dead_start + len(records)])
    if len(dead) < len(records):
        raise BadHeader("a journal without its dead bytes")
    return header, dead, records, len(raw) <= header.records_start + len(records) * RECORD_NBYTES


def read_growth(segment: Segment, idx: int) -> Words:
    """Read what was appended since; sets ``segment.final`` where the journal has been cut behind it."""
    start = segment.header.records_start + segment.count * RECORD_NBYTES
    raw = os.pread(idx, RECORD_NBYTES, start)
    if not raw or segment.count >= segment.header.room:
        segment.final = True
    if not raw.strip(b"\0"):
        return np.empty((0, WORDS), np.uint64)
    raw = os.pread(idx, _GROWTH_NBYTES, start)
    records = parse(raw, segment.header.id, segment.count)
    if len(records) * RECORD_NBYTES == _GROWTH_NBYTES:
        rest = os.pread(idx, (segment.header.room - segment.count) * RECORD_NBYTES, start)
        records = parse(rest, segment.header.id, segment.count)
    return records


def _named(header: SegmentHeader, name: str) -> SegmentHeader:
    if header.id.hex() != name:
        raise BadHeader(f"the journal of {header.id.hex()} under the name {name}")
    return header
