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

    __slots__ = ("data_end", "full", "handle", "lock", "segment")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.segment: Segment | None = None
        self.handle: Handle | None = None
        #: Where the next page goes.
        self.data_end = 0
        #: True once nothing may be appended any more, whatever room is left.
        self.full = False

    def fits(self, nbytes: int) -> int:
        """Tell how many more pages of this size the open segment takes."""
        if self.segment is None or self.full:
            return 0
        header = self.segment.header
        return max(0, min((header.nbytes - self.data_end) // nbytes, header.room - self.segment.count))

    def enter(self, segment: Segment, handle: Handle) -> None:
        """Append to this segment from now on."""
        self.segment, self.handle, self.data_end, self.full = (
            segment,
            handle,
            0,
            False,
        )

    def leave(self) -> None:
        """Become empty."""
        self.segment, self.handle, self.data_end, self.full = None, None, 0, False


class Task:
    """Work handed to the helper; ``join`` waits for it and raises what it raised."""

    __slots__ = ("_done", "_error", "_work")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        """Do the work, in the helper."""
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised again by join, in the thread that asked
            self._error = error
        finally:
            self._done.release()

    def join(self) -> None:
        """Wait until the work is done; a caller never returns before (C11)."""
        self._done.acquire()
        if self._error is not None:
            raise self._error


class Helper:
    """One daemon thread that takes one task at a time; started on first use."""

    __slots__ = ("_claim", "_closed", "_queue", "_thread")

    def __init__(self) -> None:
        self._claim = threading.Lock()
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def claim(self) -> bool:
        """Take the helper for one task, without waiting; ``release`` it after the join."""
        return not self._closed and self._claim.acquire(blocking=False)

    def release(self) -> None:
        """Let others claim it."""
        self._claim.release()

    def start(self, work: Callable[[], None]) -> Task:
        """Have the helper do something; it is claimed by the caller."""
        task = Task(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="hicache-file-lane", daemon=True)
            self._thread.start()
        self._queue.put(task)
        return task

    def close(self, timeout_s: float) -> None:
        """End the thread; idempotent."""
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout_s)

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task
