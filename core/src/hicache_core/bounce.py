"""Bounce: the backend sees private memory only, from a thread that can be left behind.

Native code that hangs cannot be interrupted. So it is given memory that nobody
else uses: the calling thread copies a set's slots in before the call, and a
get's pages out after it, before the deadline. At the deadline it walks away;
the thread and its memory stay referenced, and registered with the backend,
until the native call ends by itself (C11). What is left behind is bounded,
since no more than MAX_ABANDONED calls run at a time: while all of them work, a
further one waits for its turn; while all are left behind, it is refused at once.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from hicache_core.errors import BackendTimeout, BackendUnavailable
from hicache_core.identity import Component
from hicache_core.memory import HostPool, Pages
from hicache_core.status import OK, Status, is_answer
from hicache_core.storage import HiCacheStorage

T = TypeVar("T")

MAX_ABANDONED = 4
#: Private bytes a worker and component; enough that the copy, not the hand-over, is the cost.
BOUNCE_NBYTES = 32 << 20
MAX_BOUNCE_PAGES = 128


class Bouncer:
    """Worker threads with private memory in front of one storage; thread-safe."""

    def __init__(self, storage: HiCacheStorage) -> None:
        self._storage = storage
        self._lock = threading.Condition(threading.Lock())
        self._busy = 0
        self._idle: list[_Worker] = []
        self._waiting: deque[object] = deque()
        self._abandoned = 0
        self._closed = False

    @property
    def abandoned(self) -> int:
        """How many native calls were left behind and still run."""
        return self._abandoned

    def call(self, work: Callable[[], T], timeout_s: float) -> T:
        """Run ``work`` on a worker and wait for it at most timeout_s.

        Raises:
            BackendTimeout: it still runs and was left behind.
            BackendUnavailable: MAX_ABANDONED calls are left behind already.
            Exception: whatever work raised.
        """
        deadline = time.monotonic() + timeout_s
        return self._finish(self._take(deadline), _Job(lambda _: work()), deadline)

    def get_pages(self, keys: Sequence[str], pages: Pages, timeout_s: float) -> Any:
        """Run batch_get on private memory and copy the OK pages into their slots; raises as ``call``.

        At most ``pages_a_call`` pages.
        """
        deadline = time.monotonic() + timeout_s
        worker = self._take(deadline)
        slots = self._ready(worker, lambda: worker.slots(pages.component, len(pages)))
        job = _Job(lambda known: self._on_private(known, slots, lambda: self._storage.batch_get(keys, slots)))
        statuses = self._finish(worker, job, deadline, keep=True)
        try:
            if is_answer(statuses, len(keys)):
                _copy_out(slots, pages, statuses)
        finally:
            self._give_back(worker)
        return statuses

    def set_pages(self, keys: Sequence[str], pages: Pages, timeout_s: float) -> Any:
        """Copy the slots into private memory and run batch_set on that; raises as ``call``.

        At most ``pages_a_call`` pages.
        """
        deadline = time.monotonic() + timeout_s
        worker = self._take(deadline)
        slots = self._ready(worker, lambda: _copied_in(pages, worker.slots(pages.component, len(pages))))
        job = _Job(lambda known: self._on_private(known, slots, lambda: self._storage.batch_set(keys, slots)))
        return self._finish(worker, job, deadline)

    def forget_memory(self) -> None:
        """Have the storage forget the private memory, which ends with the workers; no call runs."""
        with self._lock:
            private = [pool for worker in self._idle for pool in worker.known_pools()]
        for pool in private:
            self._storage.drop_pool(pool)

    def close(self) -> None:
        """Let the workers end; those left behind end with their native calls."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._lock.notify_all()
        for worker in idle:
            worker.jobs.put(None)

    def _on_private(self, known: set[int], slots: Pages, work: Callable[[], T]) -> T:
        """Make the private pool known to the backend, once, on the worker: registering may hang too."""
        pool = slots.pool
        if pool is not None and id(pool) not in known:
            self._storage.add_pool(pool)
            known.add(id(pool))
        return work()

    def _ready(self, worker: _Worker, prepare: Callable[[], Pages]) -> Pages:
        try:
            return prepare()
        except BaseException:
            self._give_back(worker)
            raise

    def _take(self, deadline: float) -> _Worker:
        """Give a worker to one caller; where all work, callers wait in the order in which they came.

        Without an order whoever has just given one back takes it again, and the others meet their deadlines.
        """
        turn = object()
        with self._lock:
            self._waiting.append(turn)
            try:
                while self._closed or self._busy >= MAX_ABANDONED or self._waiting[0] is not turn:
                    if self._closed or self._abandoned >= MAX_ABANDONED:
                        raise BackendUnavailable(
                            f"'{self._storage.spec.name}' does not answer",
                            value=f"{self._abandoned} calls are left behind",
                            remedy="Look at the store; calls work again once it answers or these calls end.",
                        )
                    if not self._lock.wait(max(0.0, deadline - time.monotonic())):
                        raise self._no_answer()
                worker = self._idle.pop() if self._idle else _Worker(self)
                self._busy += 1
            finally:
                self._waiting.remove(turn)
                self._lock.notify_all()  # the next one's turn, whatever became of this one
        return worker

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            self._busy -= 1
            self._lock.notify_all()
            if not self._closed:
                self._idle.append(worker)
                return
        worker.jobs.put(None)

    def _no_answer(self) -> BackendTimeout:
        return BackendTimeout(
            f"'{self._storage.spec.name}' gave no answer in time",
            remedy="Look at the store, or raise timeout_s.",
        )

    def _finish(self, worker: _Worker, job: _Job[T], deadline: float, *, keep: bool = False) -> T:
        worker.jobs.put(job)
        try:
            job.done.acquire(timeout=max(0.0, deadline - time.monotonic()))
        finally:  # also when the wait itself is interrupted
            with self._lock:
                if not job.finished:
                    job.abandoned = True
                    self._abandoned += 1
                    self._lock.notify_all()
        if job.abandoned:
            raise self._no_answer()
        if job.error is not None or not keep:
            self._give_back(worker)
        if job.error is not None:
            raise job.error
        return job.result

    def _ended(self, worker: _Worker, job: _Job[Any]) -> None:
        """Note on the worker's thread that a job is over; one that was left behind frees its worker."""
        with self._lock:
            job.finished = True
            if job.abandoned:
                self._abandoned -= 1
        job.done.release()
        if job.abandoned:
            self._give_back(worker)


class _Job(Generic[T]):
    """One call on a worker; ``finished`` and ``abandoned`` change under the bouncer's lock only."""

    __slots__ = ("abandoned", "done", "error", "finished", "result", "work")

    result: T

    def __init__(self, work: Callable[[set[int]], T]) -> None:
        self.work = work
        self.done = threading.Lock()
        self.done.acquire()
        self.finished = False
        self.abandoned = False
        self.error: BaseException | None = None


class _Worker:
    """A daemon thread and its private memory; used by one caller at a time."""

    def __init__(self, bouncer: Bouncer) -> None:
        self.jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._pools: dict[Component, HostPool] = {}
        self._known: set[int] = set()
        threading.Thread(target=self._run, args=(bouncer,), name="hicache-bounce", daemon=True).start()

    def slots(self, component: Component, count: int) -> Pages:
        """Give the first ``count`` private pages of a component; memory is made on first use."""
        pool = self._pools.get(component)
        if pool is None:
            memory = mmap.mmap(-1, component.page_nbytes * pages_a_call(component))
            pool = self._pools[component] = HostPool.from_buffer(memory, component)
        return pool.pages(range(count))

    def known_pools(self) -> list[HostPool]:
        """Give the private memory that the backend was told of."""
        return [pool for pool in self._pools.values() if id(pool) in self._known]

    def _run(self, bouncer: Bouncer) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                job.result = job.work(self._known)
            except BaseException as error:
                job.error = error
            bouncer._ended(self, job)
            del job


def run_apart(
    work: Callable[[], T],
    timeout_s: float,
    *,
    what: str,
    late: Callable[[T], None] = lambda _: None,
    left_behind: list[threading.Thread] | None = None,
) -> T:
    """Run something slow and rare (open, close) on a thread of its own and wait at most timeout_s.

    Args:
        what: for the error, for example ``opening 'acme'``.
        late: called with the result of a run that was left behind, once it ends.
        left_behind: bounds what is left behind: where it holds MAX_ABANDONED
            threads that still run, nothing is started.

    Raises:
        BackendTimeout: it still runs and was left behind.
        BackendUnavailable: too many were left behind and still run.
        Exception: whatever work raised.
    """
    left_behind = [] if left_behind is None else left_behind
    left_behind[:] = [thread for thread in left_behind if thread.is_alive()]
    if len(left_behind) >= MAX_ABANDONED:
        raise BackendUnavailable(
            what,
            value=f"{len(left_behind)} earlier attempts still run",
            remedy="Look at the store; it is tried again once they end.",
        )
    lock = threading.Lock()
    job: _Job[T] = _Job(lambda _: work())

    def run() -> None:
        try:
            job.result = job.work(set())
        except BaseException as error:
            job.error = error
        with lock:
            job.finished = True
        job.done.release()
        if job.abandoned and job.error is None:
            late(job.result)

    thread = threading.Thread(target=run, name="hicache-apart", daemon=True)
    thread.start()
    job.done.acquire(timeout=timeout_s)
    with lock:
        job.abandoned = not job.finished
    if job.abandoned:
        left_behind.append(thread)
        raise BackendTimeout(
            what, value=f"no answer within {timeout_s:g} s", remedy="Look at the store, or raise timeout_s."
        )
    if job.error is not None:
        raise job.error
    return job.result


def pages_a_call(component: Component) -> int:
    """How many pages of a component one bounced call carries."""
    return max(1, min(MAX_BOUNCE_PAGES, BOUNCE_NBYTES // max(1, component.page_nbytes)))


def _copied_in(pages: Pages, slots: Pages) -> Pages:
    for position in range(len(pages)):
        (private,) = slots.views(position)
        at = 0
        for view in pages.views(position):
            private[at : at + view.nbytes] = view
            at += view.nbytes
    return slots


def _copy_out(slots: Pages, pages: Pages, statuses: Sequence[Status]) -> None:
    for position, status in enumerate(statuses):
        if status is not OK:
            continue
        (private,) = slots.views(position)
        at = 0
        for view in pages.views(position):
            view[:] = private[at : at + view.nbytes]
            at += view.nbytes
