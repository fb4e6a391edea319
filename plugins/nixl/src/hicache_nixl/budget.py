"""A byte budget over all pages of a store, shared by its processes, kept by removing the least recently used.

The first folder holds a small file: the capacity and the bytes of each fan. It
changes under flock only. A set reserves its bytes before it writes a page, and
evicts first where they do not fit, so the store never grows past its capacity
by more than what writers died with; a scan of a fan corrects its number.

Last use is a file's mtime, which a get and a set of a present page renew. A
scan samples fans, each a fair sample of the store since keys are digests, until
it has seen enough, and queues the older half, or all where it saw the whole
store. A victim that was used since is passed over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence

from hicache_core.errors import BackendIncompatible, BackendTimeout
from hicache_nixl._native import note
from hicache_nixl.folders import FANS, Folders

FILE_NAME = "hicache-nixl.budget"

#: Pages a scan looks at, where the store has as many: 0.2 s, spread over the evictions that follow.
SAMPLE = 65_536

_HEADER = struct.Struct("<8sIIq")
_MAGIC = b"HICNXBUD"
_VERSION = 1
_PAUSE_S = 0.0005
#: Scans in a row from which no page could be removed, since all were used or removed meanwhile.
_IDLE_SCANS = 3


class Budget:
    """Thread-safe, and safe with any number of processes on the same folders."""

    def __init__(self, folders: Folders, removed: Callable[[str], None] | None = None) -> None:
        self._folders = folders
        #: Is told the path of each page that is evicted here.
        self._removed = removed
        self._path = f"{folders.folders[0]}/{FILE_NAME}"
        self._lock = threading.Lock()
        self._descriptor = -1
        self._capacity = 0
        self._queue: list[tuple[int, int, str, int]] = []
        self._next_fan = os.getpid() % FANS

    @classmethod
    def open(
        cls,
        folders: Folders,
        capacity: int | None,
        deadline: float,
        removed: Callable[[str], None] | None = None,
    ) -> Budget | None:
        """Join the store's budget; None where it has none and none is given.

        Args:
            removed: is told the path of each page that is evicted here.

        Raises:
            BackendTimeout: another process holds the budget's lock until the deadline.
            BackendIncompatible: a later version wrote it.
        """
        budget = cls(folders, removed)
        if capacity is None and not os.path.exists(budget._path):
            return None
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        budget._descriptor = os.open(budget._path, flags, 0o600)
        joined = False
        try:
            joined = budget._join(capacity, deadline)
        finally:
            if not joined:
                budget.close()
        return budget if joined else None

    @property
    def capacity(self) -> int:
        """Most bytes of all pages."""
        return self._capacity

    def used(self, deadline: float) -> int:
        """Give the bytes of all pages, reservations included."""
        with self._table(deadline) as table:
            return sum(table)

    def reserve(self, needs: Sequence[tuple[int, int]], deadline: float) -> int:
        """Make room for pages, given as (fan, bytes); give how many of the leading ones fit and are reserved.

        Raises:
            BackendTimeout: the lock was not had by the deadline.
        """
        with self._table(deadline) as table:
            needed = min(sum(nbytes for _, nbytes in needs), self._capacity)
            if self._capacity - sum(table) < needed:
                self._make_room(table, needed, deadline)
            free = self._capacity - sum(table)
            fitting = 0
            for fan, nbytes in needs:
                if nbytes > free:
                    break
                free -= nbytes
                table[fan] += nbytes
                fitting += 1
            return fitting

    def release(self, returned: Sequence[tuple[int, int]], deadline: float) -> None:
        """Give back what was reserved or removed, as (fan, bytes)."""
        if returned:
            with self._table(deadline) as table:
                for fan, nbytes in returned:
                    table[fan] = max(0, table[fan] - nbytes)

    def close(self) -> None:
        """Leave the budget; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def abandon_in_child(self) -> None:
        """Close the lock's descriptor in the child of a fork."""
        self._lock = threading.Lock()
        self.close()

    def _join(self, capacity: int | None, deadline: float) -> bool:
        """Read, change or make the stored capacity; False where there is none."""
        with self._locked(deadline):
            header = os.pread(self._descriptor, _HEADER.size, 0)
            if len(header) < _HEADER.size:  # new, or its maker died before the first write
                if capacity is None:
                    return False
                sums = array("q", map(self._folders.fan_nbytes, range(FANS)))
                os.pwrite(self._descriptor, sums.tobytes(), _HEADER.size)
                header = b""
            else:
                kept = self._kept_capacity(header)
                if capacity is None or capacity == kept:
                    self._capacity = kept
                    return True
                note("nixl: the capacity in %s changes from %d to %d bytes", self._path, kept, capacity)
            os.pwrite(self._descriptor, _HEADER.pack(_MAGIC, _VERSION, 0, capacity), 0)
            self._capacity = capacity
            return True

    def _kept_capacity(self, header: bytes) -> int:
        magic, version, _, kept = _HEADER.unpack(header)
        if magic != _MAGIC or version != _VERSION:
            raise BackendIncompatible(
                "nixl",
                f"the budget in '{self._path}' is of another version",
                value=f"{magic!r} {version}",
                remedy="Install the hicache-nixl that wrote it, or remove the file: it is counted anew.",
            )
        return int(kept)

    @contextlib.contextmanager
    def _table(self, deadline: float) -> Iterator[array[int]]:
        """Hold the lock, give the bytes of each fan, and write back what changed."""
        with self._locked(deadline):
            raw = os.pread(self._descriptor, _HEADER.size + 8 * FANS, 0)
            self._capacity = _HEADER.unpack_from(raw)[3]
            table = array("q")
            table.frombytes(raw[_HEADER.size :])
            before = table.tobytes()
            try:
                yield table
            finally:
                after = table.tobytes()
                if after != before:
                    os.pwrite(self._descriptor, after, _HEADER.size)

    @contextlib.contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._late()
        try:
            while True:
                try:
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise self._late() from None
                    time.sleep(_PAUSE_S)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def _late(self) -> BackendTimeout:
        return BackendTimeout(
            "the budget of 'nixl' is held by another process",
            value=self._path,
            remedy="See which process holds it (lslocks), or raise timeout_s.",
        )

    def _make_room(self, table: array[int], needed: int, deadline: float) -> None:
        """Remove the least recently used pages until ``needed`` bytes are free, or no more can be."""
        idle_scans = 0
        while self._capacity - sum(table) < needed and time.monotonic() < deadline:
            if not self._queue:
                idle_scans += 1
                if idle_scans > _IDLE_SCANS or not self._scan(table):
                    return
                continue
            used_ns, nbytes, path, fan = self._queue.pop()
            try:
                if os.stat(path, follow_symlinks=False).st_mtime_ns != used_ns:
                    continue
                os.unlink(path)
            except OSError:
                continue
            if self._removed is not None:
                self._removed(path)
            table[fan] = max(0, table[fan] - nbytes)
            idle_scans = 0

    def _scan(self, table: array[int]) -> bool:
        """Queue victims, oldest last; correct the numbers of the fans looked at. False: nothing found."""
        seen: list[tuple[int, int, str, int]] = []
        looked = 0
        while looked < FANS and len(seen) < SAMPLE:
            fan = self._next_fan
            self._next_fan = (fan + 1) % FANS
            looked += 1
            found = [(*entry, fan) for entry in self._folders.fan(fan)]
            table[fan] = sum(nbytes for _, nbytes, _, _ in found)
            seen += found
        seen.sort(reverse=True)
        self._queue = seen if looked == FANS else seen[len(seen) // 2 :]
        return bool(self._queue)
