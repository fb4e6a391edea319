"""The trailer that ends every stored page, and the checksum in it.

A page is stored as its bytes followed by 64 bytes that say what they should be.
NIXL reports neither a short file (1.4) nor a short object (1.5.1) reliably, so
nothing is believed that does not end in the right trailer.

Files have one of two sizes. Plain: page, trailer. Padded, for O_DIRECT: page,
zeros up to a whole block, and one block whose last 64 bytes are the trailer.
Both end in the trailer, so a reader needs the size alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum

import xxhash

#: magic, format version, flags, reserved, page bytes, digest of the qualified key, page checksum, check word.
_TRAILER = struct.Struct("<8sHHIQ16s16sQ")
_MAGIC = b"HICNIXL\n"
_VERSION = 1
_HAS_CHECKSUM = 1

TRAILER_NBYTES = _TRAILER.size
#: What O_DIRECT wants of addresses, offsets and sizes; 4 KiB satisfies every file system we know.
BLOCK_NBYTES = 4096

_NO_CHECKSUM = bytes(16)
_key_digest = xxhash.xxh3_128_digest
_check_word = xxhash.xxh3_64_intdigest
_checksum_of_one = xxhash.xxh3_128_digest


class Verdict(Enum):
    """What a trailer says about the bytes before it."""

    GOOD = "good"
    OTHER_SIZE = "other size"
    DAMAGED = "damaged"


def plain_nbytes(page_nbytes: int) -> int:
    """Size of a plain file or object."""
    return page_nbytes + TRAILER_NBYTES


def padded_nbytes(page_nbytes: int) -> int:
    """Size of a padded file."""
    return -(-page_nbytes // BLOCK_NBYTES) * BLOCK_NBYTES + BLOCK_NBYTES


def checksum(segments: Sequence[memoryview]) -> bytes:
    """Give the 16 bytes that stand for a page's segments, joined in order."""
    if len(segments) == 1:
        return _checksum_of_one(segments[0])
    state = xxhash.xxh3_128()
    for segment in segments:
        state.update(segment)
    return state.digest()


def pack(qualified_key: str, page_nbytes: int, page_checksum: bytes | None) -> bytes:
    """Make the trailer of a page; without a checksum where none was computed."""
    head = _TRAILER.pack(
        _MAGIC,
        _VERSION,
        0 if page_checksum is None else _HAS_CHECKSUM,
        0,
        page_nbytes,
        _key_digest(qualified_key.encode()),
        _NO_CHECKSUM if page_checksum is None else page_checksum,
        0,
    )
    return head[:-8] + _check_word(head[:-8]).to_bytes(8, "little")


def examine(trailer: bytes, qualified_key: str, page_nbytes: int | None) -> tuple[Verdict, bytes | None]:
    """Judge a trailer; with GOOD comes the checksum that the page must have, None where it has none.

    Args:
        page_nbytes: the size that is wanted, None for any.
    """
    if len(trailer) != TRAILER_NBYTES:
        return Verdict.DAMAGED, None
    magic, version, flags, _, nbytes, digest, page_checksum, word = _TRAILER.unpack(trailer)
    if magic != _MAGIC or version != _VERSION or word != _check_word(trailer[:-8]):
        return Verdict.DAMAGED, None
    if digest != _key_digest(qualified_key.encode()):
        return Verdict.DAMAGED, None
    if page_nbytes is not None and nbytes != page_nbytes:
        return Verdict.OTHER_SIZE, None
    return Verdict.GOOD, page_checksum if flags & _HAS_CHECKSUM else None


def stored_page_nbytes(trailer: bytes) -> int | None:
    """Give the page size that an intact trailer names; None for one that is not."""
    if len(trailer) != TRAILER_NBYTES or _check_word(trailer[:-8]) != _TRAILER.unpack(trailer)[-1]:
        return None
    magic, version, _, _, nbytes, *_ = _TRAILER.unpack(trailer)
    return int(nbytes) if magic == _MAGIC and version == _VERSION else None
