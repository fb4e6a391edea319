"""The value of a page in EIC: a head (how long it is, what it must hash to), the page, a mark at its end.

EIC tells neither a value's size nor whether it is whole. With a head in front, both are known after any
get, whatever the service does with a buffer of another size; the mark is what a value that lost bytes
lacks, since the buffer may still hold the very bytes that were lost. The hash begins from the page's name:
a transfer that lands late, in memory that waits for another page by now, does not pass for that one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from hicache_core.status import OK, Status

_HEAD = struct.Struct("<8sQQQ")
_MAGIC = b"HiCacEI2"

_END = b"HiCacEnd"

#: Bytes in front of a page, and with those behind it.
HEAD_NBYTES = _HEAD.size
FRAME_NBYTES = HEAD_NBYTES + len(_END)


def write_head(value: memoryview, name: str) -> None:
    """Fill in head and mark of a value whose page is in place."""
    page = value[HEAD_NBYTES : -len(_END)]
    value[-len(_END) :] = _END
    checksum = _checksum(page, name)
    _HEAD.pack_into(value, 0, _MAGIC, page.nbytes, checksum, page.nbytes ^ checksum)


def blank_head(value: memoryview) -> None:
    """Make sure that what a get does not write is not taken for a head or a mark."""
    value[:HEAD_NBYTES] = bytes(HEAD_NBYTES)
    value[-len(_END) :] = bytes(len(_END))


def judge(value: memoryview, name: str) -> Status:
    """Tell whether a value that was fetched is the whole page of this name and size."""
    magic, nbytes, checksum, check = _HEAD.unpack_from(value)
    if magic != _MAGIC or nbytes ^ checksum != check:
        return Status.CORRUPT
    if nbytes != value.nbytes - FRAME_NBYTES:
        return Status.SIZE_MISMATCH
    if value[-len(_END) :] != _END:
        return Status.CORRUPT
    return OK if _checksum(value[HEAD_NBYTES : -len(_END)], name) == checksum else Status.CORRUPT


def _checksum(page: memoryview, name: str) -> int:
    return xxh3_64_intdigest(page, xxh3_64_intdigest(name.encode()))


def copy_in(views: Sequence[memoryview], value: memoryview) -> None:
    """Put a page's segments behind the head."""
    at = HEAD_NBYTES
    for view in views:
        value[at : at + view.nbytes] = view
        at += view.nbytes


def copy_out(value: memoryview, views: Sequence[memoryview]) -> None:
    """Put a page into its segments."""
    at = HEAD_NBYTES
    for view in views:
        view[:] = value[at : at + view.nbytes]
        at += view.nbytes
