"""Counters and latency histograms of one HiCache, cheap enough to be always on."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hicache_core.status import OK, Status

VERBS = ("contains", "exists", "get", "set", "remove")

#: Bucket b counts calls of less than 2**b microseconds and not less than half of that; the last is open.
LATENCY_BUCKETS = 36


@dataclass(frozen=True, slots=True)
class VerbStats:
    """What one verb did so far."""

    calls: int
    pages: int
    """Pages asked for; for exists, page hashes."""
    nbytes: int
    """Bytes of the pages that were OK (get and set)."""
    seconds: float
    statuses: Mapping[Status, int]
    """Pages by outcome."""
    latency: tuple[int, ...]
    """Calls by duration; see LATENCY_BUCKETS."""

    def quantile_s(self, share: float) -> float:
        """Give an upper bound of this quantile of a call's duration, in seconds; 0 without calls."""
        wanted = share * self.calls
        seen = 0
        for bucket, count in enumerate(self.latency):
            seen += count
            if count and seen >= wanted:
                return (1 << bucket) * 1e-6
        return 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of one HiCache."""

    verbs: Mapping[str, VerbStats]
    late: int
    """Calls that returned after their deadline, or were left behind at it."""
    abandoned: int
    """Native calls that were left behind and still run."""
    breaker: str
    """``closed``, ``open`` or ``half-open``."""
    dead_keys: int
    """Keys that are not asked for because a get failed on them."""


class Counters:
    """Thread-safe; one lock a call, nothing grows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows = {verb: _Row() for verb in VERBS}
        self.late = 0

    def record(self, verb: str, statuses: Sequence[Status], page_nbytes: int, seconds: float) -> None:
        """Count one call's outcome."""
        pages = len(statuses)
        good = statuses.count(OK)
        bucket = min(int(seconds * 1e6).bit_length(), LATENCY_BUCKETS - 1)
        with self._lock:
            row = self._rows[verb]
            row.calls += 1
            row.pages += pages
            row.nbytes += good * page_nbytes
            row.seconds += seconds
            row.latency[bucket] += 1
            row.statuses[OK] += good
            if good != pages:
                for status in statuses:
                    if status is not OK:
                        row.statuses[status] += 1

    def record_late(self) -> None:
        """Count a call that overran its deadline."""
        with self._lock:
            self.late += 1

    def snapshot(self) -> Mapping[str, VerbStats]:
        """Copy everything out."""
        with self._lock:
            return MappingProxyType({verb: row.frozen() for verb, row in self._rows.items()})


class _Row:
    __slots__ = ("calls", "latency", "nbytes", "pages", "seconds", "statuses")

    def __init__(self) -> None:
        self.calls = 0
        self.pages = 0
        self.nbytes = 0
        self.seconds = 0.0
        self.statuses = dict.fromkeys(Status, 0)
        self.latency = [0] * LATENCY_BUCKETS

    def frozen(self) -> VerbStats:
        statuses = MappingProxyType({status: count for status, count in self.statuses.items() if count})
        return VerbStats(self.calls, self.pages, self.nbytes, self.seconds, statuses, tuple(self.latency))
