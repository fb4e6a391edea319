"""Snapshots as Prometheus metric families: every name, label and help text is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from hicache_core.status import Status
from hicache_core.storage import Usage
from hicache_prometheus.cells import Labels
from hicache_prometheus.snapshot import (
    ABANDONED,
    BOUNDS_S,
    BREAKERS,
    CALLS,
    DEAD_KEYS,
    FIRST_BUCKET,
    IDENTITY_FIELDS,
    LATE,
    NANOSECONDS,
    NBYTES,
    STATUSES,
    Snapshot,
)

_VERB = ("backend", "namespace", "component", "verb")
_CACHE = ("backend", "namespace")


def families(snapshot: Snapshot, usages: Mapping[Labels, Usage] | None = None) -> Iterator[Metric]:
    """Give all families of a snapshot, and of what stores said: (backend, namespace) -> Usage."""
    yield from _verbs(snapshot)
    yield from _caches(snapshot)
    if usages is not None:
        yield from usage_families(usages)


def _verbs(snapshot: Snapshot) -> Iterator[Metric]:
    calls = CounterMetricFamily("hicache_operations", "Calls of HiCache.", labels=_VERB)
    nbytes = CounterMetricFamily("hicache_bytes", "Bytes of the pages that were OK.", labels=_VERB)
    pages = CounterMetricFamily(
        "hicache_pages", "Pages asked for, by what became of each.", labels=(*_VERB, "status")
    )
    seconds = HistogramMetricFamily(
        "hicache_operation_seconds", "Duration of calls of HiCache, as the engine meets it.", labels=_VERB
    )
    for labels, cells in sorted(snapshot.verbs.items()):
        calls.add_metric(labels, cells[CALLS])
        nbytes.add_metric(labels, cells[NBYTES])
        for status in Status:
            if cells[STATUSES + status]:
                pages.add_metric((*labels, status.name.lower()), cells[STATUSES + status])
        seconds.add_metric(labels, _buckets(cells), cells[NANOSECONDS] / 1e9)
    yield from (calls, nbytes, pages, seconds)


def _buckets(cells: tuple[int, ...]) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    for at, bound in enumerate([*map(str, BOUNDS_S), "+Inf"]):
        total += cells[FIRST_BUCKET + at]
        buckets.append((bound, total))
    return buckets


def _caches(snapshot: Snapshot) -> Iterator[Metric]:
    late = CounterMetricFamily(
        "hicache_late_calls", "Calls that overran their deadline, or were left behind at it.", labels=_CACHE
    )
    abandoned = GaugeMetricFamily(
        "hicache_abandoned_calls", "Native calls that were left behind and still run.", labels=_CACHE
    )
    dead = GaugeMetricFamily(
        "hicache_dead_keys", "Keys not asked for because a get failed on them.", labels=_CACHE
    )
    breaker = GaugeMetricFamily(
        "hicache_breakers", "Open caches, by the state of their circuit breaker.", labels=(*_CACHE, "state")
    )
    info = GaugeMetricFamily(
        "hicache_namespace_info", "What a namespace's pages mean.", labels=("namespace", *IDENTITY_FIELDS)
    )
    for labels, cells in sorted(snapshot.caches.items()):
        late.add_metric(labels, cells[LATE])
        if any(cells[at] for at in BREAKERS.values()):
            abandoned.add_metric(labels, cells[ABANDONED])
            dead.add_metric(labels, cells[DEAD_KEYS])
            for state, at in BREAKERS.items():
                breaker.add_metric((*labels, state), cells[at])
    for namespace, texts in sorted(snapshot.identities.items()):
        info.add_metric((namespace, *texts), 1)
    yield from (late, abandoned, dead, breaker, info)


def usage_families(usages: Mapping[Labels, Usage]) -> Iterator[Metric]:
    """Give what stores say of their use."""
    pages = GaugeMetricFamily("hicache_namespace_pages", "Pages in the namespace.", labels=_CACHE)
    nbytes = GaugeMetricFamily("hicache_namespace_bytes", "Bytes of the namespace's pages.", labels=_CACHE)
    store = GaugeMetricFamily(
        "hicache_store_bytes",
        "Bytes that the store takes, all namespaces and overhead included.",
        labels=_CACHE,
    )
    capacity = GaugeMetricFamily(
        "hicache_store_capacity_bytes",
        "The most that the store may take; absent without a limit.",
        labels=_CACHE,
    )
    for labels, usage in sorted(usages.items()):
        pages.add_metric(labels, usage.pages)
        nbytes.add_metric(labels, usage.bytes)
        store.add_metric(labels, usage.store_bytes)
        if usage.capacity is not None:
            capacity.add_metric(labels, usage.capacity)
    yield from (pages, nbytes, store, capacity)
