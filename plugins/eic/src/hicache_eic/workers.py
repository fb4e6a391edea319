"""Threads that call EIC, each with private memory; one that hangs can be left behind.

EIC's calls have no timeout. So they run on daemon threads and see private memory only, never a slot; the
caller copies, and walks away at the deadline. A thread that was left behind stays, with its memory, until
its call ends, and is used again then. Beyond MAX_ABANDONED of them nobody waits any more: the service is
stuck.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from hicache_core.buffers import address_of
from hicache_core.errors import BackendTimeout, BackendUnavailable
from hicache_eic.native import Native

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
        self._made = 0
        self._abandoned = 0
        self._closed = False

    def take(self, deadline: float) -> Worker:
        """Give a worker that nobody uses; give it back, or have ``run`` leave it behind.

        Raises: BackendUnavailable, BackendTimeout.
        """
        with self._changed:
            while True:
                if self._closed or self._abandoned >= min(MAX_ABANDONED, self._most):
                    raise BackendUnavailable(
                        "EIC does not answer",
                        value=f"{self._abandoned} calls are left behind",
                        remedy="Look at the service; calls work again once these end.",
                    )
                if self._idle:
                    return self._idle.pop()
                if self._made < self._most:
                    self._made += 1
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _late()
                self._changed.wait(left)
        try:
            return Worker(self, self._staging_nbytes)
        except BaseException:
            with self._changed:
                self._made -= 1
            raise

    def give_back(self, worker: Worker) -> None:
        """Let others use a worker."""
        with self._changed:
            if not self._closed:
                self._idle.append(worker)
                self._changed.notify()
                return
        worker.end()

    def run(self, worker: Worker, call: Callable[[Native], T], deadline: float) -> T:
        """Have a worker do a call and wait for it; the worker stays the caller's unless this raises.

        Raises: BackendTimeout, with the worker left behind; whatever the call raised, with it given back.
        """
        job: _Job[T] = _Job(call)
        worker.jobs.put(job)
        job.done.acquire(timeout=max(0.0, deadline - time.monotonic()))
        with self._changed:
            if not job.finished:
                job.abandoned = True
                self._abandoned += 1
        if job.abandoned:
            raise _late()
        if job.error is not None:
            self.give_back(worker)
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
            self.give_back(worker)

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

    def __init__(self, workers: Workers, nbytes: int) -> None:
        self.jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self.memory = Memory(workers.native, nbytes)
        #: The storage's own, one a worker.
        self.luggage: Any = None
        self._thread = threading.Thread(target=self._run, args=(workers,), name="hicache-eic", daemon=True)
        self._thread.start()

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
    """Private memory, registered as what it is where EIC takes it."""

    def __init__(self, native: Native, nbytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, nbytes))
        self.address = address_of(self.view)
        self.registered = native.register(self.address, nbytes)

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


def _late() -> BackendTimeout:
    return BackendTimeout("EIC gave no answer in time", remedy="Look at the service, or raise timeout_s.")
