"""The value of a page in EIC: a head that says how long it is and what its bytes must hash to, then the page.

EIC tells neither a value's size nor whether it is whole. With a head in front, both are known after any
get, whatever the service does with a buffer of another size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from hicache_core.status import OK, Status

_HEAD = struct.Struct("<8sQQQ")
_MAGIC = b"HiCacEI1"

#: Bytes in front of a page.
HEAD_NBYTES = _HEAD.size


def write_head(value: memoryview) -> None:
    """Fill in the head of a value whose page is in place."""
    page = value[HEAD_NBYTES:]
    checksum = xxh3_64_intdigest(page)
    _HEAD.pack_into(value, 0, _MAGIC, page.nbytes, checksum, page.nbytes ^ checksum)


def blank_head(value: memoryview) -> None:
    """Make sure that what a get does not write is not taken for a head."""
    value[:HEAD_NBYTES] = bytes(HEAD_NBYTES)


def judge(value: memoryview) -> Status:
    """Tell whether a value that was fetched is a whole page of this size."""
    magic, nbytes, checksum, check = _HEAD.unpack_from(value)
    if magic != _MAGIC or nbytes ^ checksum != check:
        return Status.CORRUPT
    if nbytes != value.nbytes - HEAD_NBYTES:
        return Status.SIZE_MISMATCH
    return OK if xxh3_64_intdigest(value[HEAD_NBYTES:]) == checksum else Status.CORRUPT


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
