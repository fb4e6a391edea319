"""One page's way between a page file and its slot, and what moves a batch of them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any, Protocol

from xxhash import xxh3_64, xxh3_64_intdigest

from hicache_core.status import Status
from hicache_hf3fs.pagefile import PageFile

#: -errno of a transfer that was given up at the deadline, or never started.
TIMED_OUT = -errno.ETIMEDOUT

_STATUS = {
    errno.ENOSPC: Status.NO_SPACE,
    errno.EDQUOT: Status.NO_SPACE,
    errno.EACCES: Status.DENIED,
    errno.EPERM: Status.DENIED,
    errno.EROFS: Status.DENIED,
    errno.ETIMEDOUT: Status.TIMEOUT,
    errno.ESTALE: Status.UNAVAILABLE,
    errno.ENOTCONN: Status.UNAVAILABLE,
    errno.EHOSTDOWN: Status.UNAVAILABLE,
    errno.ENODEV: Status.UNAVAILABLE,
}


class PageIO:
    """One page to move; the client fills ``result`` and ``checksum``."""

    __slots__ = ("checksum", "in_flight", "nbytes", "offset", "result", "views")

    def __init__(self, offset: int, views: Sequence[memoryview], nbytes: int) -> None:
        self.offset = offset
        self.views = views
        self.nbytes = nbytes
        self.result = TIMED_OUT
        """Bytes moved, or -errno."""
        self.checksum: int | None = None
        """Of the bytes that moved, where it was asked for."""
        self.in_flight = False
        """A write was given up and may still reach the file."""

    @property
    def status(self) -> Status:
        """OK where the whole page moved; a short count is a page whose end is not there."""
        if self.result == self.nbytes:
            return Status.OK
        if self.result >= 0:
            return Status.CORRUPT
        return _STATUS.get(-self.result, Status.ERROR)


class PageMover(Protocol):
    """A client: moves batches of pages, from any thread. Each verb returns with every result settled."""

    def attach(self, file: PageFile) -> None:
        """Make a page file usable; raises HiCacheError."""

    def detach(self, file: PageFile) -> None:
        """Forget a page file, before it is closed; an unknown one is ignored."""

    def read(self, file: PageFile, pages: Sequence[PageIO], *, checksum: bool, deadline: float) -> None:
        """Read pages into their views."""

    def write(self, file: PageFile, pages: Sequence[PageIO], *, checksum: bool, deadline: float) -> None:
        """Write pages from their views, which are only read."""

    def close(self) -> None:
        """Give everything back; idempotent."""

    def abandon_in_child(self) -> None:
        """See that a fork's child never touches what is the parent's."""


def checksum_of(views: Sequence[Any]) -> int:
    """Give 63 bits of xxh3 over a page's segments in storage order; 63, so that it fits a signed column."""
    if len(views) == 1:
        return int(xxh3_64_intdigest(views[0])) >> 1
    digest = xxh3_64()
    for view in views:
        digest.update(view)
    return int(digest.intdigest()) >> 1
