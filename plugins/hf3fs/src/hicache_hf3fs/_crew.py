"""Daemon threads that help a caller with one batch; the caller works too, and waits for whoever began."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue

#: Helpers are idle by then: close() comes after the last verb.
_CLOSE_TIMEOUT_S = 1.0


class Crew:
    """Helpers, made on first need; thread-safe. With none, callers do all their work themselves."""

    def __init__(self, helpers: int) -> None:
        self._most = helpers
        self._helpers: list[threading.Thread] = []
        self._efforts: SimpleQueue[_Effort | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def run(self, jobs: Iterable[Callable[[], None]]) -> None:
        """Have every job done once, by this thread and the helpers.

        What a job raises is raised here, when no helper works on any other; jobs not begun by then never are.
        """
        effort = _Effort(jobs)
        try:
            for _ in range(self._ready(len(effort.jobs) - 1)):
                self._efforts.put(effort)
            effort.work()
        finally:
            effort.finish()
        if effort.error is not None:
            raise effort.error

    def close(self) -> None:
        """Let the helpers end; one that hangs in a system call is left behind, a daemon."""
        with self._lock:
            self._closed = True
            helpers, self._helpers = self._helpers, []
        for _ in helpers:
            self._efforts.put(None)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for helper in helpers:
            helper.join(max(0.0, deadline - time.monotonic()))

    def _ready(self, wanted: int) -> int:
        if wanted <= 0:
            return 0
        with self._lock:
            if self._closed:
                return 0
            while len(self._helpers) < min(wanted, self._most):
                helper = threading.Thread(target=self._help, name="hicache-hf3fs-io", daemon=True)
                try:
                    helper.start()
                except RuntimeError:  # the system has no thread to give: the caller works alone
                    break
                self._helpers.append(helper)
            return min(wanted, len(self._helpers))

    def _help(self) -> None:
        while (effort := self._efforts.get()) is not None:
            effort.help()
            del effort


class _Effort:
    """One batch's jobs; a helper that comes when the work is over does not touch it."""

    def __init__(self, jobs: Iterable[Callable[[], None]]) -> None:
        self.jobs = deque(jobs)
        self.error: BaseException | None = None
        self._idle = threading.Condition(threading.Lock())
        self._helping = 0
        self._over = False

    def work(self) -> None:
        while True:
            try:
                job = self.jobs.popleft()
            except IndexError:
                return
            job()

    def help(self) -> None:
        with self._idle:
            if self._over:
                return
            self._helping += 1
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - the caller's to raise
            self.error = error
            self.jobs.clear()
        finally:
            with self._idle:
                self._helping -= 1
                self._idle.notify_all()

    def finish(self) -> None:
        self.jobs.clear()  # there are some where one has raised
        interrupt: BaseException | None = None
        while True:
            try:
                with self._idle:
                    self._over = True
                    while self._helping:
                        self._idle.wait()
                break
            except BaseException as error:  # noqa: BLE001 - Ctrl-C; a helper may still write into a slot
                interrupt = error
        if interrupt is not None:
            raise interrupt
