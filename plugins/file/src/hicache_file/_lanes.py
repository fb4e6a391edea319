"""Lanes and the helper: how one batch uses two cores.

A lane is one open segment of ours and its lock. Two threads on one file gain
nothing, since the kernel has one lock a file; so a large batch is halved, and
the calling thread and one helper thread write to a lane each. Handing work over
costs 14 microseconds and pays from about half a MiB. The helper is claimed
without waiting: when it is busy with another call, the caller does all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from hicache_file._segment import Handle, Segment

#: Batches below this are moved by the calling thread alone.
SHARED_FROM_NBYTES = 512 << 10


class Lane:
    """One open segment of this instance, or none yet; guarded by ``lock``."""

    __slots__ = ("data_end", "full", "handle", "lock", "segment", "torn")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.segment: Segment | None = None
        self.handle: Handle | None = None
        #: Where the next page goes.
        self.data_end = 0
        #: True once nothing may be appended any more, whatever room is left.
        self.full = False
        #: True while the journal may hold records that are not counted: for good where a set is interrupted.
        self.torn = False

    def fits(self, nbytes: int) -> int:
        """Tell how many more pages of this size the open segment takes."""
        if self.segment is None or self.full or self.torn:
            return 0
        header = self.segment.header
        return max(0, min((header.nbytes - self.data_end) // nbytes, header.room - self.segment.count))

    def enter(self, segment: Segment, handle: Handle) -> None:
        """Append to this segment from now on."""
        self.segment, self.handle, self.data_end = segment, handle, 0
        self.full = self.torn = False

    def leave(self) -> None:
        """Become empty."""
        self.segment, self.handle, self.data_end = None, None, 0
        self.full = self.torn = False


class _Task:
    """Work offered to the helper: done once, by the helper or by the thread that offers it."""

    __slots__ = ("_done", "_ended", "_error", "_taken", "_work")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        #: Who has it. ``setdefault`` settles it once, and an interrupted caller may ask again.
        self._taken: dict[str, bool] = {}
        self._ended = False
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        """Do the work, in the helper, unless its owner has taken it back."""
        if not self._taken.setdefault("by the helper", True):
            return
        try:
            if self._work is not None:
                self._work()
        except BaseException as error:  # noqa: BLE001 - raised again by join, in the thread that asked
            self._error = error
        finally:
            self._ended = True
            self._done.release()

    def join(self) -> None:
        """Wait until the work is done, or do it where the helper has not begun; raise what it raised."""
        if not self._taken.setdefault("by the helper", False) and self._work is not None:
            self._work()
        self.leave()
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        """Keep the helper from beginning, or outlast it; idempotent.

        A caller's memory and descriptors are its own again afterwards (C11), so an interrupt waits as well.
        """
        interrupt: BaseException | None = None
        while self._taken.setdefault("by the helper", False) and not self._ended:
            try:
                self._done.acquire()
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
        self._work = None
        if interrupt is not None:
            raise interrupt


class Helper:
    """One daemon thread that takes one task at a time; started on first use.

    Where no thread is to be had, callers do all of their work themselves.
    """

    __slots__ = ("_claim", "_closed", "_queue", "_thread")

    def __init__(self) -> None:
        self._claim = threading.Lock()
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def claim(self) -> bool:
        """Take the helper for one ``share``, without waiting."""
        return not self._closed and self._claim.acquire(blocking=False)

    def share(self, theirs: Callable[[], None], ours: Callable[[], None]) -> None:
        """Do two things at once and raise what they raise; the helper is claimed, and is given back.

        However this ends, neither is at work any more.
        """
        task = _Task(theirs)
        try:
            try:
                self._offer(task)
                ours()
                task.join()
            finally:
                task.leave()
        finally:
            task.leave()  # an interrupt may come as the first call begins
            self._claim.release()

    def close(self, timeout_s: float) -> None:
        """End the thread; idempotent."""
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._queue.put(None)
            thread.join(timeout_s)

    def _offer(self, task: _Task) -> None:
        """Hand a task over; where no thread can be started, it stays with its owner."""
        if self._thread is None or not self._thread.is_alive():  # an interrupt may come before its start
            self._thread = threading.Thread(target=self._serve, name="hicache-file-lane", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None
                return
        self._queue.put(task)

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task
