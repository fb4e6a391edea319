"""The janitor: one thread for what must be done and nobody should wait for.

Cutting the tail of a full segment, and closing the last descriptor of a deleted
one, which frees its page cache (.5 ms for 8 MiB). Both wait for milliseconds on
a busy machine, and sets would wait with them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

#: Beyond so much waiting work, those who bring more do it themselves.
_MOST_WAITING = 64

Work = Callable[[], None]

_log = logging.getLogger("hicache_file")


class Janitor:
    """A daemon thread, started on first use; what work raises is logged."""

    __slots__ = ("_closed", "_lock", "_queue", "_thread")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def post(self, work: Work) -> bool:
        """Have work done later; False once closed, or without a thread, and then it is the caller's."""
        with self._lock:
            if self._closed or not self._started():
                return False
            self._queue.put(work)
            return True

    def do(self, work: Work) -> None:
        """Have work done soon: later, or now where too much waits."""
        if self._queue.qsize() >= _MOST_WAITING or not self.post(work):
            work()

    def flush(self, timeout_s: float) -> None:
        """Wait until what was posted so far is done."""
        if self._thread is not None:
            done = threading.Event()
            if self.post(done.set):
                done.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Finish what waits and end the thread; idempotent."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._queue.put(None)
            thread.join(timeout_s)

    def _started(self) -> bool:
        if self._thread is None or not self._thread.is_alive():  # an interrupt may come before its start
            self._thread = threading.Thread(
                target=_serve, args=(self._queue,), name="hicache-file-janitor", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None
                return False
        return True


def _serve(queue: SimpleQueue[Work | None]) -> None:
    while (work := queue.get()) is not None:
        try:
            work()
        except Exception:  # noqa: BLE001 - or all that is posted later would never be done
            _log.exception("work that nobody waits for has failed")
        del work
