"""The one place that touches aibrix_kvcache: a store of records under 32-digit keys.

Whole batches go through the library's BaseKVCacheManager. Where it says less
than has to be known (which page of a batch was missing, why one failed, what a
namespace holds), its connector is asked, which is not public: hence the range
of versions, and ``_check`` before the first page.

What is worked around, each shown by tests/test_defects.py (aibrix-kvcache 0.8.0):

- The manager's counts: SHFS counts every page that it read, wherever it lies in
  the batch. Here a page is there when its own record was filled.
- Buffers: on a timeout the manager frees memory that a thread of its still
  writes. Here the memory is a record's own, never the manager's pool.
- L1 takes two batches of equal length and last key for the same, and stands in
  front of L2 with pages of its own: it stays off, the engine's host memory is L1.
- Settings come from the environment only: they are set on the library's
  settings module for the moment in which a manager is made, under a lock.
- Its event loop is stopped and never closed, three descriptors each time.
- SHFS looks whether a file is there and opens, measures or unlinks it by name
  afterwards: a page that was removed between the two is an error to it. Here
  that is a miss, and a set whose file another took away is written again.
- Its metrics keep lists with an entry a call, for ever: they are emptied now and
  then. HiCache counts the same; docs/aibrix.md says which figure is which.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hicache_aibrix.making import Native, close_loop, load, make_manager, prepare_root
from hicache_aibrix.options import AibrixOptions
from hicache_aibrix.record import TRAILER_NBYTES, verdict
from hicache_core.errors import (
    BackendTimeout,
)
from hicache_core.status import OK, Status

#: Calls after which the library's lists of figures are emptied.
_CALLS_MEASURED = 1000

#: How often a value is written whose file was removed, by a remove or by another process's clear, while
#: SHFS still looked at it.
_WRITES = 5

_making = threading.Lock()
_open: dict[tuple[str, str, str], Library] = {}


class Record:
    """What the library takes for a memory region: it fills ``value``, or has it made.

    The connectors use ``length``, ``fill`` and ``tobytes``; a handle's release
    calls ``ref_down``. Nothing but this object holds the bytes, so a call that
    comes back late harms nobody.
    """

    __slots__ = ("length", "make", "value")

    def __init__(self, length: int, make: Callable[[], bytes] = bytes) -> None:
        self.length = length
        #: Makes the value when it is its turn: a batch of them would be as much new memory again.
        self.make = make
        self.value: bytes | None = None

    def fill(self, value: bytes) -> None:
        self.value = value

    def tobytes(self) -> bytes:
        return self.make()

    def ref_up(self) -> None:
        return None

    def ref_down(self) -> None:
        return None


class Library:
    """One manager on one namespace's store, shared by all storages of this process that open it.

    Threads: reads from any; ``put`` and ``clear`` while holding ``writing``.
    """

    def __init__(self, native: Native, options: AibrixOptions, namespace: str, timeout_s: float) -> None:
        self.kind = options.backend
        self.root = options.root
        #: SHFS gives a key one temporary name, so two writers of a key would mix their bytes.
        self.writing = threading.Lock()
        #: Digests of values on which a get has failed.
        self.bad: set[bytes] = set()
        self.users = 0
        self._calls = itertools.count(1)
        self._native = native
        self._manager = make_manager(native, options, namespace, timeout_s)
        self._connector: Any = self._manager._l2_cache._backend

    # Batches, through the manager.

    def get(self, keys: Sequence[str], nbytes: int) -> list[bytes | None]:
        """Read what is stored under each key; None where nothing was read, for whatever reason."""
        records = [Record(nbytes) for _ in keys]
        # The count is not used: it says how many, not which.
        self._manager.get(None, self._hashes(keys), self._handle(records))
        return [record.value for record in records]

    def put(self, keys: Sequence[str], nbytes: int, values: Sequence[Callable[[], bytes]]) -> bool:
        """Store all values, each of nbytes; False when some were not."""
        records = [Record(nbytes, make) for make in values]
        try:
            stored = self._manager.put(None, self._hashes(keys), self._handle(records))
        except Exception:  # noqa: BLE001 - where a file is not written it fails on its own error path, AttributeError
            return False
        return bool(stored.is_ok() and stored.get() == len(keys))

    def exists(self, keys: Sequence[str]) -> int:
        """Count the leading keys that hold a value."""
        found = self._manager.exists(None, self._hashes(keys))
        return int(found.get()) if found.is_ok() else 0

    def _hashes(self, keys: Sequence[str]) -> Any:
        if next(self._calls) % _CALLS_MEASURED == 0:
            self._manager.metrics.reset()
        return self._native.package.BlockHashes(list(keys), 1)

    def _handle(self, records: list[Record]) -> Any:
        return self._native.package.MemoryRegionKVCacheHandle(self._native.torch.uint8, (1,), records)

    # Single keys, through the connector.

    def contains(self, key: str) -> Status:
        """Tell whether there is a value; of a file also whether it can hold a page."""
        size = self._size(key)
        if size is not None and size <= TRAILER_NBYTES:
            return Status.CORRUPT
        return _status(self._connector._exists(key.encode()))

    def is_whole(self, key: str, nbytes: int, digest: bytes) -> bool:
        """Tell whether a present value has a page's size; RocksDB has to read it for that."""
        if self.kind == "shfs":
            return self._size(key) == nbytes + TRAILER_NBYTES
        _, value = self.get_one(key, nbytes + TRAILER_NBYTES)
        return value is not None and verdict(value, nbytes, digest) is OK

    def get_one(self, key: str, nbytes: int) -> tuple[Status, bytes | None]:
        """Read one value, and say why there is none."""
        record = Record(nbytes)
        status = _status(self._connector._get(key.encode(), record))
        if status is Status.ERROR and self._size(key) not in (None, nbytes):
            return Status.SIZE_MISMATCH, None
        return status, record.value

    def put_one(self, key: str, nbytes: int, value: Callable[[], bytes]) -> Status:
        """Store one value, and say why it was not."""
        for _ in range(_WRITES):
            status = _status(self._connector._put(key.encode(), Record(nbytes, value)))
            if status is not Status.MISS:
                return status
        return Status.ERROR

    def remove(self, key: str) -> Status:
        """Remove one value; MISS where there is none."""
        there = self.contains(key)
        return _status(self._connector._delete(key.encode())) if there is OK else there

    def _size(self, key: str) -> int | None:
        """Tell a file's size, which SHFS compares and does not report."""
        if self.kind != "shfs":
            return None
        try:
            return int(os.stat(self._connector._key_to_filepath(key.encode())).st_size)
        except OSError:
            return None

    # The whole namespace.

    def sizes(self) -> Iterator[int]:
        """Give the stored bytes of every value, one after the other."""
        if self.kind == "rocksdb":
            for value in self._connector.store.values():
                yield len(value)
            return
        for path in _files(str(self._connector.root_path)):
            with contextlib.suppress(FileNotFoundError):
                if not path.endswith(".tmp"):
                    yield os.stat(path).st_size

    def store_nbytes(self) -> int:
        """Sum the bytes of all files of the root."""
        total = 0
        for path in _files(self.root):
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(path).st_size
        return total

    def clear(self) -> int:
        """Remove every value of the namespace and give how many there were."""
        removed = 0
        if self.kind == "rocksdb":
            store = self._connector.store
            for key in list(store.keys()):
                store.delete(key)
                removed += 1
            return removed
        for path in _files(str(self._connector.root_path)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                removed += not path.endswith(".tmp")
        return removed

    def close(self) -> None:
        """Give back the store, the library's threads and its event loop."""
        manager, self._manager, self._connector = self._manager, None, None
        if manager is None:
            return
        loop = manager._event_loop
        manager.close()
        close_loop(loop)

    def abandon_in_child(self) -> None:
        """Never use or close, in a fork's child, what is the parent's."""
        _parents.append((self._manager, self._connector))
        self._manager = self._connector = None


#: In a fork's child: the parent's managers, kept so that no destructor closes what the parent uses.
_parents: list[Any] = []


def open_library(options: AibrixOptions, namespace: str, timeout_s: float) -> Library:
    """Open a namespace's store, or join the one that this process has open; ``leave`` ends it.

    Raises: BackendDependencyMissing, BackendIncompatible, BackendUnavailable.
    """
    native = load()
    place = (options.backend, os.path.realpath(options.root), namespace)
    with _held(timeout_s):
        library = _open.get(place)
        if library is None:
            prepare_root(options)
            library = _open[place] = Library(native, options, namespace, timeout_s)
        library.users += 1
    return library


def leave(library: Library) -> None:
    """Close a store when its last user in this process has left it."""
    with _making:
        library.users -= 1
        if library.users:
            return
        for place in [place for place, other in _open.items() if other is library]:
            del _open[place]
        library.close()


def store_of(root: str, namespace: str) -> Any:
    """Give the open RocksDB of a namespace, for the harness; None where this process has none."""
    library = _open.get(("rocksdb", os.path.realpath(root), namespace))
    return None if library is None else library._connector.store


def forget_in_child() -> None:
    """Give a fork's child no store of its parent's."""
    global _making
    _making = threading.Lock()
    for library in _open.values():
        library.abandon_in_child()
    _open.clear()


@contextlib.contextmanager
def _held(timeout_s: float) -> Iterator[None]:
    if not _making.acquire(timeout=timeout_s):
        raise BackendTimeout(
            "opening 'aibrix'",
            value=f"another store is being opened for {timeout_s:g} s",
            remedy="Look at that store's file system.",
        )
    try:
        yield
    finally:
        _making.release()


def _files(folder: str) -> Iterator[str]:
    for where, _, names in os.walk(folder):
        for name in names:
            yield os.path.join(where, name)


def _status(native: Any) -> Status:
    """Translate the library's status; its errors carry the system's words, and no number.

    A file that was gone when SHFS came to it is a MISS: ENOENT, on a network mount also ESTALE.
    """
    if native.is_ok():
        return OK
    if native.is_not_found():
        return Status.MISS
    if native.is_timeout() or native.is_cancelled():
        return Status.TIMEOUT
    if native.is_denied():
        return Status.DENIED
    said = str(native.value).lower()
    if "[errno 2]" in said or "[errno 116]" in said:
        return Status.MISS
    if native.is_out_of_memory() or "[errno 28]" in said or "[errno 122]" in said or "no space" in said:
        return Status.NO_SPACE
    if "[errno 13]" in said or "[errno 1]" in said or "[errno 30]" in said:
        return Status.DENIED
    return Status.ERROR
