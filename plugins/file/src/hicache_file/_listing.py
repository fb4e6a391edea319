"""Listing a namespace's journals, and what it means that one cannot be read."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from functools import partial

from hicache_file._files import Folder
from hicache_file._format import RECORD_NBYTES, BadHeader, SegmentHeader, UnknownVersion, is_id
from hicache_file._journal import Words
from hicache_file._segment import Handles, read_header, read_journal

GONE = (errno.ENOENT, errno.ESTALE)
#: What an error says of one file, which this process cannot read now or later. Any other (no descriptors, no
#: memory) passes: a catalog that would leave pages out because of it says so instead, and tries again.
_UNREADABLE = frozenset(
    (
        *GONE,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.ELOOP,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ENXIO,
        errno.ENODEV,
    )
)


def passes(error: Exception) -> bool:
    """Tell whether an error says nothing of the file that was to be read."""
    return isinstance(error, OSError) and error.errno not in _UNREADABLE


def list_headers(folder: Folder, handles: Handles, *, strict: bool) -> Iterator[SegmentHeader]:
    """Give the header of each journal that can be read.

    Raises:
        OSError: one cannot be read at present; UnknownVersion where that is asked for.
    """
    for name in folder.names():
        if not name.endswith(".idx") or not is_id(name[:-4]):
            continue
        try:
            yield handles.retry_when_full(partial(read_header, folder, name[:-4]))
        except UnknownVersion:
            if strict:
                raise
        except (OSError, BadHeader) as error:
            if passes(error):
                raise


def list_journal(
    folder: Folder, handles: Handles, name: str, buffer: bytearray | None = None
) -> tuple[SegmentHeader, bytes, Words, bool]:
    """Read a whole journal, see ``read_journal``; makes room where the process is out of descriptors."""
    return handles.retry_when_full(partial(read_journal, folder, name, buffer))


def most_records(folder: Folder, header: SegmentHeader) -> int:
    """Tell how many records a journal may hold by its size now, or may soon."""
    size = folder.size(f"{header.id.hex()}.idx")
    return min(header.room, max(0, size - header.records_start) // RECORD_NBYTES)
