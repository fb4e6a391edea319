"""Lanes: one helper thread beside the calling one, for copying that needs no interpreter lock.

NIXL gives the interpreter lock back while it copies. Large pages are shared:
both threads draw chunks, copy and hash them. For small pages that does not pay,
since opening, making and renaming files are many short calls between which two
threads only hand the lock to and fro; there the helper copies, and the calling
thread prepares the chunks that follow and finishes those that are through.

The helper is claimed without waiting: a busy one never delays another caller,
who then works alone. A caller returns only when the helper is done (C11).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")

#: Handing work to the helper and back takes 14 us; from here on it pays.
WORTH_NBYTES = 512 << 10
#: Chunks prepared and not finished; bounds the files that are open.
MAX_AHEAD = 4


class Lanes:
    """Thread-safe; the helper's thread starts on first use."""

    def __init__(self, count: int) -> None:
        self._claim = threading.Lock()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._alone = count < 2
        self._started = False

    def share(self, chunks: Iterable[T], drain: Callable[[Iterator[T]], None], nbytes: int) -> None:
        """Call ``drain`` with one shared iterator, here and on the helper where it is free and worth it."""
        shared = iter(list(chunks))  # a list's iterator may be drawn from by two threads, a generator's not
        if not self._claimed(nbytes):
            drain(shared)
            return
        try:
            self._work.put(lambda: drain(shared))
            try:
                drain(shared)
            finally:
                error = self._done.get()
            if error is not None:
                raise error
        finally:
            self._claim.release()

    def overlap(
        self,
        chunks: Iterable[T],
        prepare: Callable[[T], U],
        move: Callable[[U], None],
        finish: Callable[[U], None],
        nbytes: int,
    ) -> None:
        """Prepare and finish each chunk here, in order, and move it on the helper where it is free."""
        if not self._claimed(nbytes):
            for chunk in chunks:
                prepared = prepare(chunk)
                try:
                    move(prepared)
                finally:
                    finish(prepared)
            return
        ahead: deque[U] = deque()
        errors: list[BaseException] = []
        try:
            try:
                for chunk in chunks:
                    ahead.append(prepare(chunk))
                    self._work.put(partial(move, ahead[-1]))
                    while len(ahead) >= MAX_AHEAD or (ahead and not self._done.empty()):
                        self._finish_one(ahead, finish, errors)
            finally:
                while ahead:
                    self._finish_one(ahead, finish, errors)
        finally:
            self._claim.release()
        if errors:
            raise errors[0]

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

    def _finish_one(self, ahead: deque[U], finish: Callable[[U], None], errors: list[BaseException]) -> None:
        error = self._done.get()
        if error is not None:
            errors.append(error)
        finish(ahead.popleft())

    def _help(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
                outcome: BaseException | None = None
            except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
                outcome = error
            del work
            self._done.put(outcome)
            del outcome
