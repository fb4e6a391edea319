"""A tier's numbers as vLLM's stats: pages by verb and outcome, late calls, the breaker.

vLLM counts hits, bytes and failed jobs of each tier by itself; these say why.

Source: vLLM 0.28 to 0.33, ``kv_connector/v1/offloading/metrics.py`` (OffloadingConnectorStats).
"""

from __future__ import annotations

from typing import Any

from hicache_core.counters import Stats

PAGES = "vllm:kv_offload_hicache_pages"
LATE = "vllm:kv_offload_hicache_late_calls"
BREAKER = "vllm:kv_offload_hicache_breaker_open"

_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"


def definitions() -> dict[str, Any]:
    """Describe the metrics to vLLM, by name."""
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

    return {
        PAGES: OffloadingCounterMetadata(
            documentation="Pages that a hicache tier was asked for, by verb and outcome.",
            labelnames=("tier", "backend", "verb", "status"),
        ),
        LATE: OffloadingCounterMetadata(
            documentation="Calls to a hicache backend that overran their deadline.",
            labelnames=("tier", "backend"),
        ),
        BREAKER: OffloadingGaugeMetadata(
            documentation="1 while a hicache backend does not answer and is not asked.",
            labelnames=("tier", "backend"),
        ),
    }


class StatsFeed:
    """Turns HiCache's running totals into what was new since the last call; one caller."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._pages: dict[tuple[str, str], int] = {}
        self._late = 0
        self._open: bool | None = None

    def take(self, stats: Stats, tier: str) -> Any:
        """Give vLLM's stats object; None where nothing changed."""
        from importlib import import_module

        pages = {
            (verb, status.name): count
            for verb, row in stats.verbs.items()
            for status, count in row.statuses.items()
        }
        opened = stats.breaker != "closed"
        if pages == self._pages and stats.late == self._late and opened == self._open:
            return None
        labels = (tier, self._backend)
        made = import_module(_MODULE).OffloadingConnectorStats()
        for (verb, status), count in pages.items():
            grown = count - self._pages.get((verb, status), 0)
            if grown:
                made.increase_counter(PAGES, grown, (*labels, verb, status))
        if stats.late > self._late:
            made.increase_counter(LATE, stats.late - self._late, labels)
        made.set_gauge(BREAKER, int(opened), labels)
        self._pages, self._late, self._open = pages, stats.late, opened
        return made
