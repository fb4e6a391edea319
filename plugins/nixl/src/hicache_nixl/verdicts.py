"""What a file is that is not simply right: of another size, damaged, cut short, or no longer there.

Nothing here is on the way of a page that is well. A page that a get finds
damaged is read again without NIXL; if it is damaged indeed its file is cut to
nothing, through its own inode, so that every process sees it (C6).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from hicache_core import Namespace, Status
from hicache_nixl.folders import status_of
from hicache_nixl.trailer import (
    TRAILER_NBYTES,
    Verdict,
    checksum,
    examine,
    padded_nbytes,
    plain_nbytes,
    stored_page_nbytes,
)

#: Files remembered on which a get has failed; more than these and all are looked at anew.
MAX_BAD = 65_536

Mark = tuple[int, int, int]
"""inode, time of the last change, size."""

_TO_CUT = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class Verdicts:
    """Judges the files of one namespace; thread-safe."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        #: path -> mark of a file on which a get has failed (C6), unless it was cut.
        self._bad: dict[str, Mark] = {}

    def is_bad(self, path: str) -> bool:
        """True for a file on which a get of this instance has failed."""
        bad = self._bad.get(path)
        if bad is None:
            return False
        try:
            same = mark_of(os.stat(path, follow_symlinks=False)) == bad
        except OSError:
            same = False
        if not same:
            self._bad.pop(path, None)
        return same

    def remember(self, path: str, found: os.stat_result) -> None:
        """Have contains deny, and a set replace, a file on which a get has failed.

        Args:
            found: what the file was before the get looked at it, so that what came later is looked at anew.
        """
        if len(self._bad) >= MAX_BAD:
            self._bad.clear()
        self._bad[path] = mark_of(found)

    def forget(self, path: str) -> None:
        """A new file has this name."""
        if self._bad:
            self._bad.pop(path, None)

    def acquit(self, paths: Iterable[str]) -> None:
        """Forget what was said of files that a get has read well."""
        if self._bad:
            for path in paths:
                self._bad.pop(path, None)

    def by_trailer(self, descriptor: int, nbytes: int, path: str, key: str, wanted: int | None) -> Status:
        """Tell what an open file of this size is, by its trailer; ``wanted`` None for any page size.

        Never OK where a page of ``wanted`` bytes has no such size, whatever becomes of the file meanwhile.
        """
        trailer = os.pread(descriptor, TRAILER_NBYTES, max(0, nbytes - TRAILER_NBYTES))
        stored = stored_page_nbytes(trailer)
        if stored is None or nbytes not in (plain_nbytes(stored), padded_nbytes(stored)):
            return Status.CORRUPT
        verdict, _ = examine(trailer, self._namespace.qualify(key), wanted)
        if verdict is Verdict.GOOD and stored:  # a page has bytes
            return Status.CORRUPT if self.is_bad(path) else Status.OK
        return Status.CORRUPT if verdict is Verdict.DAMAGED else Status.SIZE_MISMATCH

    def condemn(self, descriptor: int, path: str, key: str, trailer: bytes, wanted: int) -> Status:
        """Look again without NIXL; cut a damaged file to nothing, so that every process sees it."""
        try:
            found = os.fstat(descriptor)
            if self._is_intact(descriptor, key, trailer, wanted):
                return Status.ERROR  # the slot changed under the read, or the read lied
        except OSError as error:
            return status_of(error)
        try:
            _cut(path, found.st_ino)
        except FileNotFoundError:
            pass
        except OSError:  # not ours to write
            self.remember(path, found)
        return Status.CORRUPT

    def _is_intact(self, descriptor: int, key: str, trailer: bytes, wanted: int) -> bool:
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            stored = os.pread(again, wanted, 0)
        finally:
            os.close(again)
        verdict, expected = examine(trailer, self._namespace.qualify(key), wanted)
        if verdict is not Verdict.GOOD or len(stored) != wanted:
            return False
        return expected is None or checksum([memoryview(stored)]) == expected


def mark_of(found: os.stat_result) -> Mark:
    """Tell a file from what has its name later: inode numbers of files that are gone are given out again."""
    return found.st_ino, found.st_ctime_ns, found.st_size


def _cut(path: str, inode: int) -> None:
    """Cut a file to nothing if it is still this one."""
    descriptor = os.open(path, _TO_CUT)
    try:
        if os.fstat(descriptor).st_ino == inode:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def why_not_read(descriptor: int) -> Status:
    """Find what NIXL does not tell: cut short since it was opened, or unreadable."""
    try:
        nbytes = os.fstat(descriptor).st_size
    except OSError as error:
        return status_of(error)
    return Status.ERROR if nbytes else Status.CORRUPT  # another get has found it damaged


def why_not_written(descriptor: int, file_nbytes: int) -> Status:
    """Find what NIXL does not tell: no space, a quota, a limit."""
    try:
        os.posix_fallocate(descriptor, 0, file_nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            return status_of(error)
    return Status.ERROR
