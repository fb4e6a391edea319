"""Rate-limited log lines: one a reason and minute, with how many were held back.

An engine makes thousands of calls a second; a dead store must not fill its disk
with logs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

INTERVAL_S = 60.0
MAX_REASONS = 256


class Notices:
    """Thread-safe; remembers a bounded number of reasons."""

    def __init__(
        self, *, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = threading.Lock()
        self._interval_s = interval_s
        self._clock = clock
        self._last: dict[tuple[str, str], tuple[float, int]] = {}

    def warn(self, subject: str, reason: str, detail: str) -> None:
        """Log ``subject: detail``, unless the same subject and reason were logged within the interval."""
        now = self._clock()
        key = (subject, reason)
        with self._lock:
            last, held_back = self._last.get(key, (None, 0))
            if last is not None and now - last < self._interval_s:
                self._last[key] = (last, held_back + 1)
                return
            if len(self._last) >= MAX_REASONS:
                self._last.clear()
            self._last[key] = (now, 0)
        more = f" ({held_back} more like it since the last such line)" if held_back else ""
        log_warning("%s: %s%s", subject, detail, more)


def log_warning(message: str, *arguments: object) -> None:
    """Log to ``hicache``; logging is imported with the first line that needs it. Never raises."""
    import logging

    try:
        logging.getLogger("hicache").warning(message, *arguments)
    except Exception:  # noqa: BLE001 - a filter or handler of the engine's own must not end a call
        pass


def described(value: object) -> str:
    """Show anything that a backend gave or raised, shortened; never raises."""
    try:
        text = repr(value[:9] if isinstance(value, (list, tuple, str, bytes)) else value)
    except Exception:  # noqa: BLE001 - a foreign __repr__ may do anything
        return f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."
