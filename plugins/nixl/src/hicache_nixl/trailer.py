"""The trailer that ends every stored page, and the checksum in it.

A page is stored as its bytes followed by 64 bytes that say what they should be.
NIXL reports neither a short file (1.4) nor a short object (1.5.1) reliably, so
nothing is believed that does not end in the right trailer.

    magic 8 | version 2 | flags 2 | zero 4 | page bytes 8 | xxh3-128 of the page 16 | check word 8 | zero 16

The check word is the xxh3-64 of the 40 bytes before it and of the qualified
key, so that a value under a wrong name is found out. Flag 1: the checksum is
one; without it it is zero.

Files have one of two sizes. Plain: page, trailer. Padded, for O_DIRECT: page,
zeros up to a whole block, and one block whose last 64 bytes are the trailer.
Both end in the trailer, so a reader needs the size alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import Enum

import xxhash

_HEAD = struct.Struct("<8sHHIQ")
_MAGIC = b"HICNIXL\n"
_VERSION = 1
_HAS_CHECKSUM = 1
_CHECKED_NBYTES = _HEAD.size + 16
_WORD_END = _CHECKED_NBYTES + 8

TRAILER_NBYTES = 64
#: What O_DIRECT wants of addresses, offsets and sizes; 4 KiB satisfies every file system we know.
BLOCK_NBYTES = 4096

_NO_CHECKSUM = bytes(16)
_ZEROS = bytes(TRAILER_NBYTES - _WORD_END)
_check_word = xxhash.xxh3_64_digest
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
    return rounded(page_nbytes) + BLOCK_NBYTES


def rounded(nbytes: int) -> int:
    """Round up to whole blocks."""
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES


def checksum(segments: Sequence[memoryview]) -> bytes:
    """Give the 16 bytes that stand for a page's segments, joined in order."""
    if len(segments) == 1:
        return _checksum_of_one(segments[0])
    state = xxhash.xxh3_128()
    for segment in segments:
        state.update(segment)
    return state.digest()


def checksums(segments: Sequence[memoryview], per_page: int, positions: Sequence[int]) -> list[bytes]:
    """Give the checksums of some of the pages whose segments stand in a row, ``per_page`` each."""
    if per_page == 1:
        return [_checksum_of_one(segments[position]) for position in positions]
    return [checksum(segments[p * per_page : (p + 1) * per_page]) for p in positions]


def sealer(prefix: str, page_nbytes: int) -> Callable[[str, bytes], bytes]:
    """Give what makes trailers of pages of one size, from a key to be qualified by prefix, and a checksum.

    The same as ``pack``, for loops.
    """
    head = _HEAD.pack(_MAGIC, _VERSION, _HAS_CHECKSUM, 0, page_nbytes)
    qualifier, check_word, zeros = prefix.encode(), _check_word, _ZEROS

    def seal(key: str, page_checksum: bytes) -> bytes:
        checked = head + page_checksum
        return checked + check_word(checked + qualifier + key.encode()) + zeros

    return seal


def pack(qualified_key: str, page_nbytes: int, page_checksum: bytes | None) -> bytes:
    """Make the trailer of a page; without a checksum where none was computed."""
    flags, value = (0, _NO_CHECKSUM) if page_checksum is None else (_HAS_CHECKSUM, page_checksum)
    checked = _HEAD.pack(_MAGIC, _VERSION, flags, 0, page_nbytes) + value
    return checked + _check_word(checked + qualified_key.encode()) + _ZEROS


def examine(trailer: bytes, qualified_key: str, page_nbytes: int | None) -> tuple[Verdict, bytes | None]:
    """Judge a trailer; with GOOD comes the checksum that the page must have, None where it has none.

    Args:
        page_nbytes: the size that is wanted, None for any.
    """
    checked = trailer[:_CHECKED_NBYTES]
    if trailer[_CHECKED_NBYTES:] != _check_word(checked + qualified_key.encode()) + _ZEROS:
        return Verdict.DAMAGED, None
    magic, version, _, _, nbytes = _HEAD.unpack_from(trailer)
    if magic != _MAGIC or version != _VERSION:
        return Verdict.DAMAGED, None
    if page_nbytes is not None and nbytes != page_nbytes:
        return Verdict.OTHER_SIZE, None
    return Verdict.GOOD, checksum_in(trailer)


def checksum_in(trailer: bytes) -> bytes | None:
    """Give the checksum in a good trailer; None where it has none."""
    flags = _HEAD.unpack_from(trailer)[2]
    return trailer[_HEAD.size : _CHECKED_NBYTES] if flags & _HAS_CHECKSUM else None


def stored_page_nbytes(trailer: bytes) -> int | None:
    """Give the page size that a trailer names, unchecked; None for bytes that are none."""
    if len(trailer) != TRAILER_NBYTES:
        return None
    magic, version, _, _, nbytes = _HEAD.unpack_from(trailer)
    return int(nbytes) if magic == _MAGIC and version == _VERSION else None
