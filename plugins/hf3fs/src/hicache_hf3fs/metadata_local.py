"""The metadata in this process: no server, no other process on the same root.

Crash-safe through sqlite3. A lock file makes the root exclusive; it is a flock, so a killed process leaves
nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from hicache_core.errors import BackendTimeout, BackendUnavailable
from hicache_core.status import Status
from hicache_hf3fs._checkpoint import Checkpointer
from hicache_hf3fs._pagetable import PageTable
from hicache_hf3fs._recent import MOST_ROWS
from hicache_hf3fs._schema import DAMAGE, trouble
from hicache_hf3fs.metadata import (
    Hf3fsMetadataInterface,
    MetadataUsage,
    PageFileLabel,
    PageRef,
    Reservation,
    Terms,
    Written,
    digests_of,
)

T = TypeVar("T")


class LocalMetadata(Hf3fsMetadataInterface):
    """A page table behind a lock; thread-safe. Instances of one process on one path share the table.

    Raises: BackendUnavailable, where another process has the metadata or it cannot be opened; BackendTimeout,
        where another is being opened until the deadline; BackendIncompatible.
    """

    def __init__(self, path: str, namespace: str, terms: Terms, *, deadline: float | None = None) -> None:
        self._namespace = namespace
        self._open = True
        self._shared = _share(path, terms, deadline)

    def initialize(self, rank: str, label: PageFileLabel, owner: str = "", *, deadline: float) -> Terms:
        return self._with_table(deadline, lambda table: table.initialize(rank, label, owner))

    def reserve_and_allocate_page_indices(
        self, rank: str, keys: Sequence[tuple[str, str]], *, lease: int, deadline: float
    ) -> list[Reservation]:
        digests = digests_of([key for key, _ in keys])
        return self._with_table(
            deadline, lambda table: table.reserve(rank, self._namespace, digests, lease, time.monotonic())
        )

    def confirm_write(
        self,
        rank: str,
        written: Sequence[Written],
        pages_to_release: Sequence[int],
        *,
        lease: int,
        deadline: float,
    ) -> list[bool]:
        digests = digests_of([page.key for page in written])
        rows = [(digest, *page[1:]) for digest, page in zip(digests, written, strict=True)]
        return self._with_table(
            deadline, lambda table: table.confirm(rank, self._namespace, rows, pages_to_release, lease)
        )

    def get_page_indices(
        self, rank: str, keys: Sequence[str], *, hold: int, deadline: float
    ) -> list[PageRef | None]:
        digests = digests_of(keys)

        def find(table: PageTable) -> list[PageRef | None]:
            rows = table.find(self._namespace, digests, hold, time.monotonic())
            return [row and table.ref(row) for row in rows]

        return self._with_table(deadline, find)

    def end_read(self, hold: int) -> None:
        self._shared.end_read(hold)

    def exists(self, keys: Sequence[str], *, deadline: float) -> list[bool]:
        return self._with_table(deadline, lambda table: table.exists(self._namespace, digests_of(keys)))

    def delete_keys(self, keys: Sequence[str], *, deadline: float) -> list[bool]:
        return self._with_table(deadline, lambda table: table.delete(self._namespace, digests_of(keys)))

    def report_bad(self, bad: Sequence[tuple[str, PageRef, Status]], *, deadline: float) -> None:
        digests = digests_of([key for key, _, _ in bad])
        rows = [(digest, ref, verdict) for digest, (_, ref, verdict) in zip(digests, bad, strict=True)]
        self._with_table(deadline, lambda table: table.report_bad(self._namespace, rows))

    def touch(self, keys: Sequence[str], *, deadline: float) -> None:
        self._with_table(deadline, lambda table: table.touch(self._namespace, digests_of(keys)))

    def clear(self, *, deadline: float) -> int:
        return self._with_table(deadline, lambda table: table.clear(self._namespace))

    def usage(self, *, deadline: float) -> MetadataUsage:
        return self._with_table(deadline, lambda table: table.usage(self._namespace))

    def close(self) -> None:
        if self._open:
            self._open = False
            _part(self._shared)

    def abandon_in_child(self) -> None:
        self._open = False
        self._shared.abandon()

    def _with_table(self, deadline: float, work: Callable[[PageTable], T]) -> T:
        return self._shared.run(deadline, work)


class _Shared:
    """What the instances of one process on one path have in common."""

    def __init__(self, path: str, terms: Terms) -> None:
        self.path = path
        self.users = 0
        self._lock = threading.Lock()
        self._lock_fd = lock_exclusively(f"{path}.lock")
        _opening.add(self._lock_fd)
        try:
            # Alone on the root: whoever read or wrote through an earlier process is dead.
            self._table = open_table(path, terms, after_crash=False)
            self._checkpointer = Checkpointer(path)
        except BaseException:
            os.close(self._lock_fd)
            raise
        finally:
            _opening.discard(self._lock_fd)

    def run(self, deadline: float, work: Callable[[PageTable], T]) -> T:
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise BackendTimeout(
                f"the metadata {self.path!r} was busy", remedy="Look at its disk, or raise timeout_s."
            )
        try:
            return work(self._table)
        except (sqlite3.Error, *DAMAGE) as error:
            raise trouble(self.path, error) from error
        finally:
            self._lock.release()

    def end_read(self, hold: int) -> None:
        with self._lock:
            self._table.end_read(hold)

    def close(self) -> None:
        with self._lock:
            self._checkpointer.close()
            self._table.close()
            os.close(self._lock_fd)

    def abandon(self) -> None:
        """Let go in a fork's child, where any lock may be held by nobody; once, whoever calls first."""
        self._lock = threading.Lock()
        if _tables.pop(self.path, None) is self:
            # Closing the database here would move the parent's log under its feet: it is kept for ever,
            # untouched.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._table))
            os.close(self._lock_fd)


_tables: dict[str, _Shared] = {}
_registry_lock = threading.Lock()
#: Locks of metadata that are being opened: nobody in a fork's child will ever use or close these.
_opening: set[int] = set()


def _start_anew_in_child() -> None:
    """A fork's child has no thread that would let go of the registry, or go on with opening."""
    global _registry_lock
    _registry_lock = threading.Lock()
    while _opening:
        os.close(_opening.pop())
    for shared in list(_tables.values()):  # whoever uses it: some are not told, as one that is being opened
        shared.abandon()


os.register_at_fork(after_in_child=_start_anew_in_child)


def _share(path: str, terms: Terms, deadline: float | None) -> _Shared:
    real = os.path.realpath(path)
    left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
    if not _registry_lock.acquire(timeout=left):
        raise BackendTimeout(
            f"the metadata {real!r} waited for another that is being opened",
            remedy="Look at that one's disk.",
        )
    try:
        shared = _tables.get(real)
        if shared is None:
            shared = _tables[real] = _Shared(real, terms)
        shared.users += 1
        return shared
    finally:
        _registry_lock.release()


def _part(shared: _Shared) -> None:
    with _registry_lock:
        shared.users -= 1
        if not shared.users:
            del _tables[shared.path]
            shared.close()


def open_table(path: str, terms: Terms, *, after_crash: bool, rows: int = MOST_ROWS) -> PageTable:
    """Open a database's table.

    Raises: BackendUnavailable, BackendIncompatible.
    """
    try:
        return PageTable(path, terms, now=time.monotonic(), after_crash=after_crash, rows=rows)
    except (sqlite3.Error, *DAMAGE) as error:
        raise trouble(path, error) from error


def lock_exclusively(path: str) -> int:
    """Make a path's metadata this process's own; give the descriptor that holds the lock.

    Raises: BackendUnavailable.
    """
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BackendUnavailable(
            f"the lock {path!r} cannot be made",
            value=error.strerror or str(error),
            remedy="Give this user the right to write there, or set metadata_path to a local disk.",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise BackendUnavailable(
            f"the metadata {path.removesuffix('.lock')!r} is in use by another process",
            remedy="Give each process its own root, or start hicache-hf3fs-metadata and set metadata_url.",
        ) from error
    return descriptor
