"""Moving the write-ahead log into the database, off the verbs' way: a checkpoint flushes the disk."""

from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import closing

#: A log larger than this is moved; sqlite's own default is 4 MB.
_LOG_NBYTES = 4 << 20
_LOOK_EVERY_S = 0.5


class Checkpointer:
    """A daemon thread with a connection of its own; passive, so that writers never wait for it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicache-hf3fs-checkpoint", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread; a checkpoint that runs is waited for."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        moved_at = 0
        while not self._stop.wait(_LOOK_EVERY_S):
            try:
                log = os.stat(f"{self._path}-wal")
                if log.st_size > _LOG_NBYTES and log.st_mtime_ns != moved_at:
                    self._move()
                    moved_at = log.st_mtime_ns
            except (OSError, sqlite3.Error):
                continue  # the next verb meets the same trouble and reports it

    def _move(self) -> None:
        with closing(sqlite3.connect(self._path, timeout=1.0, isolation_level=None)) as base:
            base.execute("PRAGMA wal_checkpoint(PASSIVE)")
