"""Transfers on threads of their own: what vLLM submits, and what it collects.

Loads and stores have threads apart, so that a store that hangs keeps no request from
its pages. The threads are daemons: one that is stuck in native code must not keep
the process from ending. Where all threads of a kind are stuck, what waits behind
them has touched no row and is given up, so that nothing but what hangs is held.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue


@dataclass(frozen=True, slots=True)
class Outcome:
    """One job's end."""

    job_id: int
    loads: bool
    keys: Sequence[bytes]
    good: Sequence[bool]
    """One a key, in order."""
    seconds: float


#: Moves the pages of a job; one truth a key. Whatever it raises fails the whole job.
Move = Callable[[], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class _Job:
    job_id: int
    loads: bool
    keys: Sequence[bytes]
    move: Move

    def failed(self, seconds: float) -> Outcome:
        return Outcome(self.job_id, self.loads, self.keys, [False] * len(self.keys), seconds)


class Jobs:
    """Submitted, running and finished transfers; the methods are the scheduler's."""

    def __init__(
        self,
        load_threads: int,
        store_threads: int,
        on_error: Callable[[BaseException], None],
        name: str,
        *,
        stuck_s: float = 30.0,
    ) -> None:
        """Start the threads.

        Args:
            stuck_s: seconds after which a thread that still runs one job counts as stuck.
        """
        self._on_error = on_error
        self._stuck_s = stuck_s
        self._finished: SimpleQueue[Outcome] = SimpleQueue()
        self._open = self._loads = 0
        self._changed = threading.Condition()
        self._lanes = {
            True: _Lane(load_threads, f"{name}-load", self._run, self._end),
            False: _Lane(store_threads, f"{name}-store", self._run, self._end),
        }
        #: True from one ``finished`` to the next while no load can begin.
        self.loads_stuck = False

    def submit(self, job_id: int, *, loads: bool, keys: Sequence[bytes], move: Move) -> None:
        """Have a thread run ``move``; its outcome will be among ``finished``."""
        with self._changed:
            self._open += 1
            self._loads += loads
        self._lanes[loads].put(_Job(job_id, loads, keys, move))

    def finished(self) -> list[Outcome]:
        """Take the outcomes since the last call; what waits behind stuck threads fails now."""
        self._give_up()
        outcomes = []
        while True:
            try:
                outcomes.append(self._finished.get_nowait())
            except Empty:
                return outcomes

    @property
    def pending(self) -> bool:
        """True while some job runs, waits, or has an outcome that was not taken."""
        return self._open > 0 or not self._finished.empty()

    @property
    def loading(self) -> bool:
        """True while some load runs or waits."""
        return self._loads > 0

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job runs or waits; False at the timeout."""
        with self._changed:
            drained = self._changed.wait_for(lambda: self._open == 0, timeout_s)
        if not drained:
            self._give_up()
        return drained

    def stop(self, timeout_s: float) -> None:
        """Let the threads end after what they run, and wait for them as long as this."""
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.stop()
        for lane in self._lanes.values():
            lane.join(deadline)

    def _give_up(self) -> None:
        self.loads_stuck = self._lanes[True].stuck(self._stuck_s)
        for lane in self._lanes.values():
            if lane.stuck(self._stuck_s):
                for job in lane.take_waiting():
                    self._end(job.failed(0.0))

    def _run(self, job: _Job) -> Outcome:
        started = time.monotonic()
        try:
            good = list(job.move())
            return Outcome(job.job_id, job.loads, job.keys, good, time.monotonic() - started)
        except BaseException as error:  # noqa: BLE001 - a job that never ends stops the engine's request for good
            self._on_error(error)
            return job.failed(time.monotonic() - started)

    def _end(self, outcome: Outcome) -> None:
        self._finished.put(outcome)
        with self._changed:
            self._open -= 1
            self._loads -= outcome.loads
            self._changed.notify_all()


class _Lane:
    """Threads that run one kind of job in the order of submission."""

    def __init__(
        self, threads: int, name: str, run: Callable[[_Job], Outcome], end: Callable[[Outcome], None]
    ) -> None:
        self._run = run
        self._end = end
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        #: When each thread's present job began.
        self._since: dict[int, float] = {}
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=name, daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: _Job) -> None:
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    def stuck(self, after_s: float) -> bool:
        """Tell whether every thread has run its job for longer than this."""
        since = list(self._since.copy().values())
        return len(since) == len(self._threads) and max(since) < time.monotonic() - after_s

    def take_waiting(self) -> list[_Job]:
        with self._changed:
            jobs = list(self._waiting)
            self._waiting.clear()
        return jobs

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def join(self, deadline: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, number: int) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._stopped:
                    self._changed.wait()
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._since[number] = time.monotonic()
            outcome = self._run(job)
            del self._since[number]  # before the end is told: who hears of it sees a free thread
            self._end(outcome)
            del job, outcome
