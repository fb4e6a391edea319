"""Threads that call EIC, each with private memory; one that hangs can be left behind.

EIC's calls have no timeout. So they run on daemon threads and see private memory only, never a slot; the
caller copies, and walks away at the deadline. A thread that was left behind stays, with its memory, until
its call ends, and is used again then. Beyond MAX_ABANDONED of them nobody waits any more: the service is
stuck. Who waits for a worker gets one in his turn.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from hicache_core.buffers import address_of
from hicache_core.errors import BackendUnavailable
from hicache_eic.native import Native, late

T = TypeVar("T")

MAX_ABANDONED = 4
#: Values begin at a cache line.
_ALIGNMENT = 64
#: Idle threads end at once when told to.
_CLOSE_TIMEOUT_S = 1.0


class Workers:
    """At most ``most`` threads; thread-safe."""

    def __init__(self, native: Native, most: int, staging_nbytes: int) -> None:
        self._native = native
        self._most = most
        self._staging_nbytes = staging_nbytes
        self._changed = threading.Condition(threading.Lock())
        self._idle: list[Worker] = []
        #: Who waits for a worker, the longest waiting first.
        self._waiting: deque[object] = deque()
        self._made = 0
        self._abandoned = 0
        self._closed = False

    @contextmanager
    def lent(self, deadline: float) -> Iterator[Worker]:
        """Lend a worker that nobody else uses; it comes back at the end, unless ``run`` left it behind.

        Raises: BackendUnavailable, BackendTimeout.
        """
        worker = self._take(deadline)
        loan = worker.loan = object()
        try:
            if not worker.furnished:
                self.run(worker, partial(worker.furnish, self._staging_nbytes), deadline)
            yield worker
        finally:
            # By now a worker that was left behind may be somebody else's.
            if worker.loan is loan:
                self._give_back(worker)

    def _take(self, deadline: float) -> Worker:
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                while True:
                    if self._closed or self._abandoned >= min(MAX_ABANDONED, self._most):
                        raise BackendUnavailable(
                            "EIC does not answer",
                            value=f"{self._abandoned} calls are left behind",
                            remedy="Look at the service; calls work again once these end.",
                        )
                    if self._waiting[0] is turn:
                        if self._idle:
                            return self._idle.pop()
                        if self._made < self._most:
                            self._made += 1
                            break
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise late()
                    self._changed.wait(left)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
        try:
            return Worker(self)
        except BaseException as error:
            with self._changed:
                self._made -= 1
                self._changed.notify_all()
            if isinstance(error, Exception):
                raise _cannot_have("a thread", error) from error
            raise

    def _give_back(self, worker: Worker) -> None:
        with self._changed:
            worker.loan = None
            if not self._closed:
                self._idle.append(worker)
                self._changed.notify_all()
                return
        worker.end()

    def run(self, worker: Worker, call: Callable[[Native], T], deadline: float) -> T:
        """Have a worker that was lent do a call, and wait for it.

        Raises: BackendTimeout, with the worker left behind; whatever the call raised.
        """
        job: _Job[T] = _Job(call)
        try:
            worker.jobs.put(job)
            job.done.acquire(timeout=max(0.0, deadline - time.monotonic()))
        finally:  # also where the wait is interrupted
            with self._changed:
                if not job.finished:
                    job.abandoned = True
                    worker.loan = None
                    self._abandoned += 1
                    self._changed.notify_all()
        if job.abandoned:
            raise late()
        if job.error is not None:
            raise job.error
        return job.result

    def close(self) -> None:
        """Let the threads end; those left behind end with their calls."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for worker in idle:
            worker.end()

    def ended(self, worker: Worker, job: _Job[Any]) -> None:
        """Note on a worker's thread that its call is over."""
        with self._changed:
            job.finished = True
            if job.abandoned:
                self._abandoned -= 1
                self._changed.notify_all()
        job.done.release()
        if job.abandoned:
            self._give_back(worker)

    @property
    def native(self) -> Native:
        """What the workers call."""
        return self._native


class _Job(Generic[T]):
    """One call; ``finished`` and ``abandoned`` change under the lock of Workers only."""

    __slots__ = ("abandoned", "call", "done", "error", "finished", "result")

    result: T

    def __init__(self, call: Callable[[Native], T]) -> None:
        self.call = call
        self.done = threading.Lock()
        self.done.acquire()
        self.finished = self.abandoned = False
        self.error: BaseException | None = None


class Worker:
    """A thread, its private memory, and whatever its owner keeps with it."""

    memory: Memory

    def __init__(self, workers: Workers) -> None:
        self.jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self.furnished = False
        #: Tells whose the worker is; None while it is idle or left behind.
        self.loan: object | None = None
        #: The storage's own, one a worker.
        self.luggage: Any = None
        self._thread = threading.Thread(target=self._run, args=(workers,), name="hicache-eic", daemon=True)
        self._thread.start()

    def furnish(self, nbytes: int, native: Native) -> None:
        """Get memory, on the worker's thread: registering it is a call to EIC, and may hang."""
        self.memory = Memory(native, nbytes)
        self.furnished = True

    def end(self) -> None:
        """Have the thread end."""
        self.jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self, workers: Workers) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                job.result = job.call(workers.native)
            except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
                job.error = error
            workers.ended(self, job)
            del job


class Memory:
    """Private memory, registered as what it is where EIC takes it.

    Raises: BackendUnavailable.
    """

    def __init__(self, native: Native, nbytes: int) -> None:
        try:
            self.view = memoryview(mmap.mmap(-1, nbytes))
            self.address = address_of(self.view)
            self.registered = native.register(self.address, nbytes)
        except Exception as error:
            raise _cannot_have(f"{nbytes} bytes of memory", error) from error

    def values(self, count: int, nbytes: int) -> list[tuple[memoryview, tuple[int, int]]]:
        """Lay out values of one size: each as a view, and as address and size."""
        stride = stride_of(nbytes)
        return [
            (self.view[at : at + nbytes], (self.address + at, nbytes))
            for at in range(0, count * stride, stride)
        ]


def stride_of(nbytes: int) -> int:
    """Give how far apart values of this size lie."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _cannot_have(what: str, error: Exception) -> BackendUnavailable:
    return BackendUnavailable(
        f"there is not {what} for EIC's calls",
        value=str(error),
        remedy="Look at the limits of this process (ulimit -u, -l), or lower workers or staging.",
    )
