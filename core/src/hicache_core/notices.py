"""Rate-limited log lines: one a reason and minute, with how many were held back.

An engine makes thousands of calls a second; a dead store must not fill its disk
with logs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

INTERVAL_S = 60.0

_log = logging.getLogger("hicache")


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
            if len(self._last) > 256:
                self._last.clear()
            self._last[key] = (now, 0)
        more = f" ({held_back} more like it since the last such line)" if held_back else ""
        _log.warning("%s: %s%s", subject, detail, more)
