"""Lanes: one helper thread beside the calling one, for copying and hashing that need no interpreter lock.

NIXL gives the interpreter lock back while it copies, and so does xxhash for more
than 64 KiB: both threads draw chunks, copy and hash them. Opening, making and
renaming files is left to the calling thread before and after that, since many
short calls of two threads only hand the lock to and fro.

The helper is claimed without waiting: a busy one never delays another caller,
who then works alone. A caller returns only when the helper is done (C11), interrupted
or not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

#: Handing work to the helper and back takes 14 us; from here on it pays.
WORTH_NBYTES = 512 << 10


class _Job:
    """Work for the helper, and what became of it."""

    __slots__ = ("ended", "error", "work")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.ended = False
        self.error: BaseException | None = None


class Lanes:
    """Thread-safe; the helper's thread starts on first use."""

    def __init__(self, count: int) -> None:
        self._claim = threading.Lock()
        self._work: SimpleQueue[_Job | None] = SimpleQueue()
        #: Wakes the caller; whether its job has ended the job says.
        self._done: SimpleQueue[None] = SimpleQueue()
        self._alone = count < 2
        self._started = False

    def share(self, chunks: Iterable[T], drain: Callable[[Iterator[T]], None], nbytes: int) -> None:
        """Call ``drain`` with one shared iterator, here and on the helper where it is free and worth it."""
        shared = iter(list(chunks))  # a list's iterator may be drawn from by two threads, a generator's not
        if not self._claimed(nbytes):
            drain(shared)
            return
        job = _Job(lambda: drain(shared))
        try:
            try:
                self._work.put(job)
                drain(shared)
            finally:
                self._outlast(job)
            if job.error is not None:
                raise job.error
        finally:
            self._claim.release()

    def _outlast(self, job: _Job) -> None:
        """Wait until the helper is done; an interrupt is raised then."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._done.get()
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
            if job.ended:
                break
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """Let the helper end; no batch may be running."""
        self._alone = True
        if self._started:
            self._work.put(None)
            self._started = False

    def _claimed(self, nbytes: int) -> bool:
        if self._alone or nbytes < WORTH_NBYTES or not self._claim.acquire(blocking=False):
            return False
        if not self._started:
            threading.Thread(target=self._help, name="hicache-nixl-lane", daemon=True).start()
            self._started = True
        return True

    def _help(self) -> None:
        while (job := self._work.get()) is not None:
            try:
                job.work()
            except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
                job.error = error
            job.ended = True
            del job
            self._done.put(None)
