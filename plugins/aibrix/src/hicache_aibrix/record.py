"""A page's record in AIBrix's store: its bytes, then a trailer that says whose bytes they are.

The library counts what it read and does not say which; it tells no damaged
value from a good one, and no value from a longer one's beginning. So each value
carries what it takes to know it again: the digest of the key it was stored
under, the page's size and a checksum of its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from xxhash import xxh3_64, xxh3_64_intdigest

from hicache_core.status import Status

#: Magic and version, key digest, page bytes, xxh3 of the page.
_TRAILER = struct.Struct("<8s16sQQ")
_MAGIC = b"HICAIBX1"
TRAILER_NBYTES = _TRAILER.size


def digest_of(key: str) -> bytes:
    """Give the 16 bytes by which a key is known to the store; SHFS makes file names of a key's hex form,
    which a whole key would make too long for any file system.
    """
    return blake2b(key.encode(), digest_size=16).digest()


def seal(views: Sequence[memoryview], nbytes: int, digest: bytes) -> bytes:
    """Make the record of a page."""
    checksum = xxh3_64()
    for view in views:
        checksum.update(view)
    return b"".join((*views, _TRAILER.pack(_MAGIC, digest, nbytes, checksum.intdigest())))


def verdict(record: bytes, nbytes: int, digest: bytes) -> Status:
    """Tell whether a record is the whole, undamaged page of this key and size."""
    if len(record) < TRAILER_NBYTES:
        return Status.CORRUPT
    magic, whose, size, checksum = _TRAILER.unpack_from(record, len(record) - TRAILER_NBYTES)
    if magic != _MAGIC or whose != digest or size != len(record) - TRAILER_NBYTES:
        return Status.CORRUPT
    if size != nbytes:
        return Status.SIZE_MISMATCH
    whole = xxh3_64_intdigest(memoryview(record)[:nbytes]) == checksum
    return Status.OK if whole else Status.CORRUPT


def copy_out(record: bytes, views: Sequence[memoryview]) -> None:
    """Copy a record's page into a slot's segments."""
    at = 0
    source = memoryview(record)
    for view in views:
        view[:] = source[at : at + view.nbytes]
        at += view.nbytes
