"""Transfers on threads of their own: what vLLM submits, and what it collects.

Loads and stores have threads apart, so that a store that hangs keeps no request from
its pages. The threads are daemons: one that is stuck in native code must not keep
the process from ending.
"""

from __future__ import annotations

import threading
import time
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


class Jobs:
    """Submitted, running and finished transfers; the methods are the scheduler's."""

    def __init__(
        self, load_threads: int, store_threads: int, on_error: Callable[[BaseException], None], name: str
    ) -> None:
        self._on_error = on_error
        self._loads: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._stores: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._finished: SimpleQueue[Outcome] = SimpleQueue()
        self._open = 0
        self._changed = threading.Condition()
        rows = [(self._loads, f"{name}-load")] * load_threads + [
            (self._stores, f"{name}-store")
        ] * store_threads
        self._threads = [
            (queue, threading.Thread(target=_work, args=(queue,), name=title, daemon=True))
            for queue, title in rows
        ]
        for _, thread in self._threads:
            thread.start()

    def submit(self, job_id: int, *, loads: bool, keys: Sequence[bytes], move: Move) -> None:
        """Have a thread run ``move``; its outcome will be among ``finished``."""
        with self._changed:
            self._open += 1
        queue = self._loads if loads else self._stores
        queue.put(lambda: self._run(job_id, loads, keys, move))

    def finished(self) -> list[Outcome]:
        """Take the outcomes since the last call."""
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

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no job runs or waits; False at the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Let the threads end after what they run, and wait for them as long as this."""
        deadline = time.monotonic() + timeout_s
        for queue, _ in self._threads:
            queue.put(None)
        for _, thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, job_id: int, loads: bool, keys: Sequence[bytes], move: Move) -> None:
        started = time.monotonic()
        try:
            good = list(move())
        except BaseException as error:  # noqa: BLE001 - a job that never ends stops the engine's request for good
            self._on_error(error)
            good = [False] * len(keys)
        self._finished.put(Outcome(job_id, loads, keys, good, time.monotonic() - started))
        with self._changed:
            self._open -= 1
            self._changed.notify_all()


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := queue.get()) is not None:
        job()
        del job
