"""What an open instance holds, and what its verbs do with it besides moving pages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hicache_core.capabilities import Capabilities
from hicache_core.mounts import is_network
from hicache_core.storage import HiCacheStorageConfig
from hicache_file._budget import Ledger, RootFile, is_open, peek_books, scan_folder
from hicache_file._catalog import Catalog
from hicache_file._epoch import EpochFile
from hicache_file._files import Folder
from hicache_file._follower import Follower
from hicache_file._format import REMOVED, BadHeader, UnknownVersion
from hicache_file._index import ABSENT, RECORD_BITS, RECORD_MASK
from hicache_file._janitor import Janitor
from hicache_file._journal import LENGTH
from hicache_file._marks import bury, mark_records
from hicache_file._reader import Reader
from hicache_file._records import read_records
from hicache_file._segment import Handles, Segment, read_header
from hicache_file._space import Space
from hicache_file._writer import Writer

if TYPE_CHECKING:
    from hicache_file.options import FileOptions

#: A budget holds at least so many of the largest page.
PAGES_IN_CAPACITY = 16


class Opened:
    """What an open instance holds."""

    def __init__(
        self, config: HiCacheStorageConfig, options: FileOptions, folder: Folder, boot: bytes
    ) -> None:
        self.config = config
        self.options = options
        self.root_path = options.root
        self.folder = folder
        self.namespace = bytes.fromhex(config.namespace.id)
        self.boot = boot
        self.network = is_network(options.root) if options.network is None else options.network
        self.capabilities = Capabilities()
        self.root: RootFile | None = None
        self.space: Space | None = None
        self.writer: Writer | None = None
        self.reader: Reader | None = None
        self.follower: Follower | None = None
        self._attaching = threading.Lock()

    @property
    def checksum(self) -> bool:
        """Whether pages are summed and verified; over a network always."""
        return self.options.checksum or self.network

    @property
    def capacity(self) -> int:
        """The root's budget as last seen, 0 for none."""
        return self.root.peek().capacity if self.root is not None else 0

    @property
    def marking(self) -> bool:
        """Whether uses are counted: somebody may evict."""
        return self.writer is not None and self.writer.capacity > 0

    def attach(self) -> bool:
        """Find the namespace's folder, for a reader that opened before any writer."""
        with self._attaching:
            return self.follower is not None or self._attach()

    def _attach(self) -> bool:
        try:
            folder = self.folder.folder(self.config.namespace.id)
        except FileNotFoundError:
            return False
        try:
            epoch = EpochFile.open(folder, self.namespace, writable=False)
        except FileNotFoundError:
            folder.close()
            return False
        except BaseException:
            folder.close()
            raise
        space = self.take(folder, epoch)
        try:
            self.follow()
        except BaseException:  # the next verb tries again, from the start
            self.space = self.follower = None
            space.janitor.close(self.config.timeout_s)
            space.close()
            raise
        return True

    def take(self, folder: Folder, epoch: EpochFile) -> Space:
        """Hold a namespace's folder."""
        janitor = Janitor()
        handles = Handles(folder, self.options.max_open_segments, janitor, writable=self.root is not None)
        self.space = Space(folder, epoch, handles, self.namespace, self.boot)
        return self.space

    def follow(self) -> Catalog:
        """Load the catalog; the root's lock is not held."""
        if self.space is None:
            raise FileNotFoundError("no namespace")
        heals = self.root is not None
        follower = Follower(self.space, heals=heals, timeout_s=self.config.timeout_s)
        helper = self.writer.helper if self.writer is not None and self.options.lanes > 1 else None
        self.reader = Reader(self.space.handles, helper, checksum=self.checksum)
        self.follower = follower  # last: from now on verbs use them
        return follower.catalog

    def current(self) -> Catalog:
        """Give a catalog that agrees with the epoch file.

        Raises:
            OSError.
        """
        if self.follower is None:
            raise FileNotFoundError("no namespace")
        return self.follower.current()

    def known(self) -> Catalog:
        """Give the same as it was last seen; asks nobody.

        Raises:
            OSError.
        """
        if self.follower is None:
            raise FileNotFoundError("no namespace")
        return self.follower.catalog

    def too_large(self, nbytes: int) -> bool:
        """Tell whether the budget is too small for pages of this size."""
        return self.writer is not None and 0 < self.writer.capacity < PAGES_IN_CAPACITY * nbytes

    def mark(self, catalog: Catalog, segment: Segment, numbers: np.ndarray) -> None:
        """Count uses; a mark that cannot be written is a use that is not counted."""
        try:
            mark_records(catalog, segment, numbers)
        except OSError:
            pass

    def drop_mismatched(
        self, catalog: Catalog, digests: Sequence[bytes], found: list[int], nbytes: int
    ) -> list[int]:
        """Bury values of another size, so that the set replaces them (C4); gives the places that stay."""
        places = np.array(found, np.int64)
        ordinals = places >> RECORD_BITS
        kept = list(found)
        doomed: list[int] = []
        for ordinal in dict.fromkeys(ordinals.tolist()):
            if ordinal < 0:
                continue
            positions = np.flatnonzero(ordinals == ordinal)
            lengths = self._lengths(catalog, ordinal, places[positions] & RECORD_MASK)
            for position, length in zip(positions.tolist(), lengths, strict=True):
                if length != nbytes:
                    kept[position] = ABSENT
                    if length:
                        doomed.append(position)
        if doomed and self.space is not None:
            with self.space.epoch.lock.held(self.config.timeout_s):
                bury(catalog, [digests[p] for p in doomed], [[found[p]] for p in doomed], REMOVED)
        return kept

    def _lengths(self, catalog: Catalog, ordinal: int, numbers: np.ndarray) -> list[int]:
        """Give the lengths of records of one segment, 0 for all when it is gone."""
        segment = catalog.segment(ordinal)
        if segment is None or self.space is None:
            return [0] * len(numbers)
        try:
            handle = self.space.handles.take(segment)
        except (FileNotFoundError, ValueError):
            catalog.forget(segment)
            return [0] * len(numbers)
        try:
            low, high = int(numbers.min()), int(numbers.max())
            records = read_records(segment, handle.idx, low, high)
            return records[numbers - low, LENGTH].tolist()
        except ValueError:
            catalog.forget(segment)
            return [0] * len(numbers)
        finally:
            self.space.handles.give(handle)

    def remove_void(self, epoch: int, timeout_s: float) -> None:
        """Unlink segments of other epochs, a few at a time so that others get the root's lock in between."""
        if self.root is None or self.space is None or self.writer is None:
            return
        self.writer.drop_void(epoch, timeout_s)
        with self.root.held(timeout_s) as ledger:
            ledger.reap()  # what the dead left open stays in the table otherwise, and here
        for name in scan_folder(self.space.folder).segments:
            if self._epoch_of(name) == epoch:
                continue
            with self.root.held(timeout_s) as ledger:
                if self._is_void(ledger, name, timeout_s):
                    ledger.remove(self.space.folder, name)

    def _is_void(self, ledger: Ledger, name: str, timeout_s: float) -> bool:
        """Tell whether a segment is of another epoch than the present one; the root is locked.

        The header comes before the epoch: a segment whose epoch is not the one that is read afterwards is
        older. Those that are open are their writers' to remove, and may have no header yet.
        """
        if self.space is None or ledger.is_registered(bytes.fromhex(name)):
            return False
        found = self._epoch_of(name)
        if found is None or is_open(self.space.folder, name):
            return False
        with self.space.epoch.lock.held(timeout_s):
            current, _ = self.space.epoch.settled_state(self.known().epoch)
        return found != current

    def _epoch_of(self, name: str) -> int | None:
        """Give a segment's epoch, 0 where nobody can read its header; None where it is gone or unknown."""
        if self.space is None:
            return None
        try:
            return read_header(self.space.folder, name).epoch
        except BadHeader:
            return 0
        except (OSError, UnknownVersion):
            return None

    def books(self) -> tuple[int, int | None]:
        """Tell the root's bytes and its budget; a reader tells them as they were last written."""
        if self.root is None:
            seen = peek_books(self.folder)
            return seen.used, seen.capacity or None
        if self.writer is not None:
            self.writer.flush(self.config.timeout_s)
        state = self.root.peek()
        if not state.dirty:
            return state.used, state.capacity or None
        with self.root.held(self.config.timeout_s) as ledger:
            return ledger.used, ledger.capacity or None

    def close(self, timeout_s: float) -> None:
        """Seal what is open and give everything back."""
        if self.writer is not None:
            try:
                self.writer.seal(timeout_s)
            except OSError:
                pass  # whoever opens the root next finds the dead segments
            self.writer.close()
        if self.space is not None:
            self.space.janitor.close(timeout_s)
            self.space.close()
        if self.root is not None:
            self.root.close()
        self.folder.close()

    def close_in_child(self) -> None:
        """Close every descriptor in a fork's child, locks with them; take no lock (C12)."""
        if self.space is not None:
            self.space.handles.close_in_child()
            self.space.epoch.close()
            self.space.folder.close()
        if self.writer is not None:
            self.writer.evictor.close()
        if self.root is not None:
            self.root.close()
        self.folder.close()
