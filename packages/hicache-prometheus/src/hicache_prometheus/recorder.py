"""The observer: counts what every HiCache of this process does. Imports nothing of Prometheus.

One lock and some twenty additions a call; nothing grows. Where
HICACHE_PROMETHEUS_DIR names a folder, the counts lie in a file there, one a
process, for ``hicache exporter``. What is not an event (breaker, late calls,
dead keys) is looked up once a second while calls come in, and at every scrape.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_core.hooks import hookimpl
from hicache_core.notices import log_warning
from hicache_prometheus.cells import CELLS, ROWS, Labels, Table
from hicache_prometheus.snapshot import (
    ABANDONED,
    BOUNDS_S,
    BREAKERS,
    CACHE,
    CALLS,
    DEAD_KEYS,
    FIRST_BUCKET,
    IDENTITY_FIELDS,
    LATE,
    NANOSECONDS,
    NBYTES,
    STATUSES,
    VERB,
    Snapshot,
)

if TYPE_CHECKING:
    from hicache_core.cache import HiCache
    from hicache_core.identity import Identity
    from hicache_core.observers import OperationEvent

FOLDER_VARIABLE = "HICACHE_PROMETHEUS_DIR"
#: Seconds between two looks at what is not an event.
LOOK_EVERY_S = 1.0
#: Stands for the namespaces that found no row.
OTHER = "other"
#: Rows kept for it.
OTHER_ROWS = 16


class Recorder:
    """Counts into a table; thread-safe. One a process is enough: ``recorder`` below."""

    def __init__(self, folder: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._folder = folder
        self._caches: weakref.WeakSet[HiCache] = weakref.WeakSet()
        self._late: weakref.WeakKeyDictionary[HiCache, int] = weakref.WeakKeyDictionary()
        self._table: Table | None = None
        self._rows: dict[Labels, tuple[int, memoryview]] = {}
        self._nowhere = memoryview(bytearray(CELLS * 8)).cast("Q")
        self._look_at = 0.0

    # What core tells.

    @hookimpl
    def hicache_started(self, cache: HiCache) -> None:
        """Watch one more cache."""
        with self._lock:
            self._caches.add(cache)
        self._look()

    @hookimpl
    def hicache_ended(self, cache: HiCache) -> None:
        """Watch it no more."""
        self._look()
        with self._lock:
            self._caches.discard(cache)
        self._look()

    @hookimpl
    def hicache_operation(self, event: OperationEvent) -> None:
        """Count one call."""
        key = (VERB, event.backend, event.namespace, event.component, event.verb)
        with self._lock:
            found = self._rows.get(key)
            cells = found[1] if found is not None else self._new_row(key)
            cells[CALLS] += 1
            cells[NBYTES] += event.nbytes
            cells[NANOSECONDS] += int(event.seconds * 1e9)
            for status, pages in event.statuses.items():
                cells[STATUSES + status] += pages
            cells[FIRST_BUCKET + bisect_left(BOUNDS_S, event.seconds)] += 1
        if time.monotonic() >= self._look_at:
            self._look()

    # What readers ask.

    def snapshot(self) -> Snapshot:
        """Copy everything out."""
        self._look()
        found = Snapshot()
        with self._lock:
            found.add(self._table.rows() if self._table is not None else ())
        return found

    def caches(self) -> list[HiCache]:
        """Give the caches that are open now."""
        with self._lock:
            return list(self._caches)

    def start_afresh_in_child(self) -> None:
        """In the child of a fork: count from nothing, in a table of its own, under a lock of its own."""
        if self._table is not None:
            self._table.leave_to_parent()
        self.__init__(self._folder)  # type: ignore[misc]

    # What is not an event.

    def _look(self) -> None:
        self._look_at = time.monotonic() + LOOK_EVERY_S
        seen = [(cache, cache.identity, cache.namespace.id, cache.stats()) for cache in self.caches()]
        now: dict[Labels, list[int]] = {}
        with self._lock:
            for cache, identity, namespace, stats in seen:
                key = (CACHE, cache.backend, namespace, *_texts(identity))
                cells = now.setdefault(key, [0] * CELLS)
                cells[LATE] += max(stats.late - self._late.get(cache, 0), 0)
                self._late[cache] = max(stats.late, self._late.get(cache, 0))  # another look may be newer
                cells[ABANDONED] += stats.abandoned
                cells[DEAD_KEYS] += stats.dead_keys
                cells[BREAKERS[stats.breaker]] += 1
            for key in self._rows:
                if key[0] == CACHE:
                    now.setdefault(key, [0] * CELLS)
            for key, cells in now.items():
                found = self._rows.get(key)
                row = found[1] if found is not None else self._new_row(key)
                row[LATE] += cells[LATE]
                for at in (ABANDONED, DEAD_KEYS, *BREAKERS.values()):
                    row[at] = cells[at]

    # Rows.

    def _new_row(self, key: Labels) -> memoryview:
        """Take a free row, else the oldest of a namespace that no cache has, else the one for all others."""
        number = self._free_row(key[2] == OTHER)
        if number is None:
            if key[2] == OTHER:
                return self._nowhere
            other = (*key[:2], OTHER, *key[3:])
            found = self._rows.get(other)
            return found[1] if found is not None else self._new_row(other)
        if self._table is None:  # only now: most children of a fork never count anything
            self._table = _table(self._folder)
        cells = self._table.label(number, key)
        self._rows[key] = (number, cells)
        return cells

    def _free_row(self, for_others: bool) -> int | None:
        taken = sum((key[2] == OTHER) == for_others for key in self._rows)
        if for_others:
            return ROWS - 1 - taken if taken < OTHER_ROWS else None
        if taken < ROWS - OTHER_ROWS:
            return taken
        used = {cache.namespace.id for cache in list(self._caches)}
        idle = next((key for key in self._rows if key[2] not in used and key[2] != OTHER), None)
        return None if idle is None else self._rows.pop(idle)[0]


def _texts(identity: Identity) -> Labels:
    fields = [getattr(identity, name) for name in IDENTITY_FIELDS]
    return tuple("" if value is None else str(value) for value in fields)


def _table(folder: Path | None) -> Table:
    if folder is not None:
        try:
            return Table(folder)
        except OSError as error:
            log_warning("%s: no file for other processes, counting goes on: %s", FOLDER_VARIABLE, error)
    return Table()


def _folder() -> Path | None:
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else None


#: The observer of this process, as its entry point names it.
recorder = Recorder(_folder())

os.register_at_fork(after_in_child=recorder.start_afresh_in_child)
