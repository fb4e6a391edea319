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

    __slots__ = ("ended", "error", "handed", "work")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        #: True once the helper has it, or will have: it is to be waited for.
        self.handed = False
        self.ended = False
        self.error: BaseException | None = None


class Lanes:
    """Thread-safe; the helper's thread starts on first use."""

    def __init__(self, count: int) -> None:
        self._claim = threading.Lock()
        self._work: SimpleQueue[_Job | None] = SimpleQueue()
        #: Wakes the caller; whether its job has ended the job says.
        self._done: SimpleQueue[None] = SimpleQueue()
        #: Held to start the helper, to give it work and to end it: nothing comes after its end.
        self._helper = threading.Lock()
        self._alone = count < 2
        self._thread: threading.Thread | None = None

    def share(self, chunks: Iterable[T], drain: Callable[[Iterator[T]], None], nbytes: int) -> None:
        """Call ``drain`` with one shared iterator, here and on the helper where it is free and worth it."""
        shared = iter(list(chunks))  # a list's iterator may be drawn from by two threads, a generator's not
        if self._alone or nbytes < WORTH_NBYTES or not self._claim.acquire(blocking=False):
            drain(shared)
            return
        job = _Job(lambda: drain(shared))
        try:
            try:
                self._hand_over(job)
                drain(shared)
            finally:
                if job.handed:
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
        """Let the helper end, after what it has; batches that still run, or begin, do without."""
        with self._helper:
            self._alone = True
            if self._thread is not None:
                self._work.put(None)
                self._thread = None

    def _hand_over(self, job: _Job) -> None:
        with self._helper:
            if self._alone:  # closed meanwhile
                return
            if self._thread is None or not self._thread.is_alive():  # an interrupt may come before its start
                self._thread = threading.Thread(target=self._help, name="hicache-nixl-lane", daemon=True)
                self._thread.start()
            job.handed = True
            self._work.put(job)

    def _help(self) -> None:
        while (job := self._work.get()) is not None:
            try:
                job.work()
            except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
                job.error = error
            job.ended = True
            del job
            self._done.put(None)
