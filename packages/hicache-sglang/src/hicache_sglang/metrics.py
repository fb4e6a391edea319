"""What ``get_stats`` hands to SGLang: its StorageMetrics, from a bounded record of recent calls.

SGLang polls in every round of its scheduler and adds what it gets to its own
histograms, so each call is reported once, and nothing grows while nobody asks.

Source: SGLang 0.5.23 ``observability/metrics_collector.py``, 0.5.9 ``metrics/collector.py`` (StorageMetrics).
"""

from __future__ import annotations

import time
from collections import deque
from importlib import import_module
from typing import Any

#: Calls kept between two polls; SGLang polls many times a second.
KEPT_CALLS = 256
_MODULES = ("sglang.srt.observability.metrics_collector", "sglang.srt.metrics.collector")


class CallRecord:
    """Pages and GB/s of recent KV reads and writes; appending and draining are thread-safe as deques are."""

    def __init__(self) -> None:
        self._reads: deque[tuple[int, float]] = deque(maxlen=KEPT_CALLS)
        self._writes: deque[tuple[int, float]] = deque(maxlen=KEPT_CALLS)
        self._metrics_class: Any = None

    def read(self, pages: int, nbytes: int, started: float) -> None:
        """Count one read of ``pages`` good pages that began at ``started`` (time.perf_counter)."""
        self._reads.append((pages, _gb_per_s(nbytes, started)))

    def wrote(self, pages: int, nbytes: int, started: float) -> None:
        """Count one write likewise."""
        self._writes.append((pages, _gb_per_s(nbytes, started)))

    def drain(self) -> Any:
        """Give what happened since the last call as SGLang's StorageMetrics; None without one."""
        metrics_class = self._metrics_class = self._metrics_class or _find_metrics_class()
        if metrics_class is None:
            return None
        metrics = metrics_class()
        for record, pages, bandwidth in (
            (self._reads, metrics.prefetch_pgs, metrics.prefetch_bandwidth),
            (self._writes, metrics.backup_pgs, metrics.backup_bandwidth),
        ):
            while record:
                count, speed = record.popleft()
                pages.append(count)
                bandwidth.append(speed)
        return metrics


def _gb_per_s(nbytes: int, started: float) -> float:
    return nbytes / 1e9 / max(time.perf_counter() - started, 1e-9)


def _find_metrics_class() -> Any:
    for name in _MODULES:
        try:
            return import_module(name).StorageMetrics
        except (ImportError, AttributeError):
            continue
    return None
