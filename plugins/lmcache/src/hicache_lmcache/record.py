"""A page's record in LMCache's store: a header that says whose page it is, then its bytes.

LMCache's adapters store raw bytes. A file that is longer than asked for is a
hit, a value of Redis that is not of the expected size breaks the connection,
and damage is nobody's business. So each record carries what it takes to know it
again: the digest of the key it was stored under, the page's size, a checksum.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from hashlib import blake2b

from xxhash import xxh3_64_intdigest

from hicache_core.status import Status

#: Magic and version, key digest, page bytes, xxh3 of the page.
_HEADER = struct.Struct("<8s16sQQ")
_MAGIC = b"HICLMC01"
HEADER_NBYTES = _HEADER.size


class Record:
    """What LMCache takes for a memory object: private memory behind ``byte_array``.

    An adapter may still write here when its caller has gone; nobody else does.
    """

    __slots__ = ("byte_array", "lost")

    def __init__(self, memory: memoryview) -> None:
        self.byte_array = memory
        #: The value went before it could be loaded.
        self.lost = False

    def take(self, value: bytes) -> None:
        """Become a stored value; lost where its size is another."""
        self.lost = len(value) != self.byte_array.nbytes
        if not self.lost:
            self.byte_array[:] = value

    def seal(self, views: Sequence[memoryview], nbytes: int, digest: bytes) -> None:
        """Become the record of a page."""
        memory, at = self.byte_array, HEADER_NBYTES
        for view in views:
            memory[at : at + view.nbytes] = view
            at += view.nbytes
        _HEADER.pack_into(memory, 0, _MAGIC, digest, nbytes, xxh3_64_intdigest(memory[HEADER_NBYTES:]))

    def verdict(self, nbytes: int, digest: bytes) -> Status:
        """Tell whether this is the whole, undamaged page of this key and size."""
        memory = self.byte_array
        if memory.nbytes < HEADER_NBYTES:
            return Status.CORRUPT
        magic, whose, size, checksum = _HEADER.unpack_from(memory, 0)
        if magic != _MAGIC or whose != digest or size != memory.nbytes - HEADER_NBYTES:
            return Status.CORRUPT
        if size != nbytes:
            return Status.SIZE_MISMATCH
        return Status.OK if xxh3_64_intdigest(memory[HEADER_NBYTES:]) == checksum else Status.CORRUPT

    def copy_out(self, views: Sequence[memoryview]) -> None:
        """Copy the page into a slot's segments."""
        at = HEADER_NBYTES
        for view in views:
            view[:] = self.byte_array[at : at + view.nbytes]
            at += view.nbytes


class Scratch:
    """Private memory of calls, used again once LMCache is done with it: new memory costs a page fault each
    4 KiB, as much as the copy. Thread-safe.
    """

    #: Buffers that wait for the next call, each as large as its largest so far.
    KEPT = 2

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[bytearray] = []

    def records(self, count: int, nbytes: int) -> list[Record]:
        """Give records for pages of nbytes; none of them looks like one that was loaded."""
        size = nbytes + HEADER_NBYTES
        memory = memoryview(self._take(count * size))
        records = [Record(memory[i * size : (i + 1) * size]) for i in range(count)]
        for record in records:
            record.byte_array[:HEADER_NBYTES] = bytes(HEADER_NBYTES)
        return records

    def done(self, records: Sequence[Record]) -> None:
        """Take memory back that nobody, LMCache's threads included, will touch any more."""
        buffer = records[0].byte_array.obj
        with self._lock:
            if isinstance(buffer, bytearray) and len(self._free) < self.KEPT:
                self._free.append(buffer)

    def _take(self, nbytes: int) -> bytearray:
        with self._lock:
            for place, buffer in enumerate(self._free):
                if len(buffer) >= nbytes:
                    return self._free.pop(place)
            if len(self._free) == self.KEPT:
                self._free.pop(0)
        return bytearray(nbytes)


def digest_of(key: str) -> bytes:
    """Give the 16 bytes by which a key is known to the store: LMCache's ``chunk_hash``."""
    return blake2b(key.encode(), digest_size=16).digest()
