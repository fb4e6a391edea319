"""The follower: keeps one catalog in agreement with the epoch file, whatever other processes do.

``current()`` begins and ends every verb: one pread of 24 bytes when nothing has
changed, else the events since, else a new catalog from the journals. An epoch
file that cannot be read is read again under its lock, and healed there.
"""

from __future__ import annotations

import errno
import os

from hicache_file._catalog import Catalog
from hicache_file._format import BadHeader
from hicache_file._space import Space

#: A torn read is read again; a file that stays unreadable is an error.
_ATTEMPTS = 3
#: As the words of a catalog that may lack what a journal of ours holds: the next verb loads another.
DOUBTED = b"doubted"


class Follower:
    """One instance's view of its namespace; thread-safe."""

    __slots__ = ("_heals", "_timeout_s", "catalog", "space")

    def __init__(self, space: Space, *, heals: bool, timeout_s: float) -> None:
        """Load the catalog.

        Raises:
            OSError; UnknownVersion.
        """
        self.space = space
        self._heals = heals
        self._timeout_s = timeout_s
        self.catalog = self._first()

    def current(self) -> Catalog:
        """Give a catalog that agrees with the epoch file.

        Raises:
            OSError.
        """
        catalog = self.catalog
        if self.space.epoch.words() == catalog.words:
            return catalog
        return self._caught_up(locked=False)

    def current_locked(self) -> Catalog:
        """The same for a caller that holds the namespace's lock."""
        return self._caught_up(locked=True)

    def _first(self) -> Catalog:
        for _ in range(_ATTEMPTS):
            try:
                return Catalog(self.space, self.space.epoch.words(), strict=True)
            except BadHeader:
                self._settle(0, locked=False)
        raise OSError(errno.EIO, "the epoch file is damaged; an instance that writes heals it")

    def _caught_up(self, *, locked: bool) -> Catalog:
        for _ in range(_ATTEMPTS):
            with self.space.lock:
                catalog = self.catalog
                words = self.space.epoch.words()
                try:
                    followed = catalog.words != DOUBTED and (words == catalog.words or catalog.follow(words))
                    if not followed:
                        self.space.epoch.look_again()
                        before, catalog = catalog, Catalog(self.space, words, catalog.segments())
                        self.catalog = catalog
                        catalog.succeed(before)
                    return catalog
                except BadHeader:
                    pass
            self._settle(catalog.epoch, locked=locked)
        raise OSError(errno.EIO, "the epoch file cannot be read")

    def _settle(self, at_least: int, *, locked: bool) -> None:
        """Wait out a writer at work, or heal the file."""
        if not self._heals:
            os.sched_yield()
        elif locked:
            self.space.epoch.settled_state(at_least)
        else:
            with self.space.epoch.lock.held(self._timeout_s):
                self.space.epoch.settled_state(at_least)
