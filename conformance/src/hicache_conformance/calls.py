"""Calls in threads of their own, and waiting: a backend that hangs must cost a case, not the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")

#: Longest that anything healthy takes, on a machine with other work to do.
PATIENCE_S = 30.0


class Call(Generic[_T]):
    """A function running in a daemon thread from now on."""

    def __init__(self, function: Callable[[], _T]) -> None:
        self._results: list[_T] = []
        self._error: BaseException | None = None
        self._function = function
        self.started = time.monotonic()
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            self._error = error
        self.seconds = time.monotonic() - self.started

    @property
    def running(self) -> bool:
        """Whether it has not returned yet."""
        return self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has returned; False when it still runs after this time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self, timeout_s: float = PATIENCE_S) -> _T:
        """Give what the function returned, or raise what it raised."""
        if not self.wait(timeout_s):
            raise AssertionError(f"a call has not returned after {time.monotonic() - self.started:.1f} s")
        if self._error is not None:
            raise self._error
        return self._results[0]


def in_threads(functions: Sequence[Callable[[], _T]], timeout_s: float = PATIENCE_S) -> list[_T]:
    """Run functions at once, released together; give their results in order or raise the first error."""
    gate = threading.Barrier(len(functions))

    def released(function: Callable[[], _T]) -> Callable[[], _T]:
        def run() -> _T:
            gate.wait(timeout_s)
            return function()

        return run

    deadline = time.monotonic() + timeout_s
    calls = [Call(released(function)) for function in functions]
    return [call.result(max(deadline - time.monotonic(), 0.01)) for call in calls]


def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Wait for a condition; give what it was in the end."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return condition()
        pause_for(0.01)
    return True


def pause_for(seconds: float) -> None:
    """Let time pass where time itself is what is tested, such as writes after a deadline."""
    threading.Event().wait(seconds)
