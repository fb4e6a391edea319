"""The circuit breaker: after repeated trouble, answer at once instead of waiting again.

closed -> (threshold failures in a row, or one trip) -> open -> (after a pause) ->
half-open: one call is let through to probe -> closed on success, open with
twice the pause on failure. A pure state machine over an injected clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum

#: Whole calls that must fail in a row; one slow answer is not an outage.
FAILURES_TO_OPEN = 3
#: Seconds until the first probe, and the longest pause between probes.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
#: Seconds after which a probe whose outcome was never reported no longer keeps others from probing.
PROBE_LEASE_S = 30.0


class BreakerState(Enum):
    """What the breaker does with the next call."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Thread-safe; while closed and healthy, ``allow`` and ``succeed`` take no lock."""

    def __init__(
        self,
        *,
        failures_to_open: int = FAILURES_TO_OPEN,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._failures_to_open = failures_to_open
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = first_pause_s
        self._retry_at = 0.0

    @property
    def state(self) -> BreakerState:
        """The state now."""
        return self._state

    def allow(self) -> bool:
        """True when a call may go through; in half-open for one caller, who must report its outcome."""
        if self._state is BreakerState.CLOSED:
            return True
        with self._lock:
            now = self._clock()
            if now < self._retry_at:
                return False
            if not self._retry_at:  # another thread closed it meanwhile
                return True
            self._state = BreakerState.HALF_OPEN
            self._retry_at = now + PROBE_LEASE_S
            return True

    def succeed(self) -> bool:
        """Report an answer from the backend, whatever it said; True when this closed the breaker."""
        if self._state is BreakerState.CLOSED and not self._failures:
            return False
        with self._lock:
            closed_now = self._state is not BreakerState.CLOSED
            self._state = BreakerState.CLOSED
            self._retry_at = 0.0
            self._failures = 0
            self._pause_s = self._first_pause_s
            return closed_now

    def fail(self) -> bool:
        """Report a call that met no answer; True when this opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._state is BreakerState.CLOSED and self._failures < self._failures_to_open:
                return False
            return self._open()

    def trip(self) -> bool:
        """Open at once, whatever came before; True when it was closed."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                return False
            return self._open()

    def _open(self) -> bool:
        opened_now = self._state is BreakerState.CLOSED
        if self._state is not BreakerState.OPEN:
            self._pause_s = (
                self._first_pause_s if opened_now else min(self._pause_s * 2, self._longest_pause_s)
            )
            self._retry_at = self._clock() + self._pause_s
        self._state = BreakerState.OPEN
        return opened_now
