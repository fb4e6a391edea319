"""One line to mount: the default registry, a server of its own, or an ASGI application."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import HTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, make_asgi_app, start_http_server
from prometheus_client.core import REGISTRY, Metric

from hicache_core.errors import HiCacheError
from hicache_core.storage import Usage
from hicache_prometheus.cells import Labels
from hicache_prometheus.families import families
from hicache_prometheus.recorder import Recorder, recorder

#: Seconds for which what a store said of its use is good enough.
USAGE_S = 15.0
#: Seconds that a scrape waits for stores to say it; they may need longer, and are heard at the next scrape.
PATIENCE_S = 1.0


class Collector:
    """What a registry asks at every scrape; thread-safe."""

    def __init__(self, source: Recorder = recorder) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._usages: dict[Labels, Usage] = {}
        self._asked = float("-inf")
        self._asking: threading.Thread | None = None

    def describe(self) -> list[Metric]:
        """Nothing is known before the first call; this keeps a registry from scraping at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Give the families as they are now."""
        return families(self._source.snapshot(), self._fresh_usages())

    def _fresh_usages(self) -> dict[Labels, Usage]:
        """Ask each store at most every USAGE_S, in a thread: a store that hangs must not hang the scrape."""
        with self._lock:
            busy = self._asking is not None and self._asking.is_alive()
            if not busy and time.monotonic() - self._asked >= USAGE_S:
                self._asked = time.monotonic()
                self._asking = threading.Thread(target=self._ask, name="hicache-usage", daemon=True)
                self._asking.start()
            asking = self._asking
        if asking is not None:
            asking.join(PATIENCE_S)
        return self._usages

    def _ask(self) -> None:
        found: dict[Labels, Usage] = {}
        for cache in self._source.caches():
            labels = (cache.backend, cache.namespace.id)
            if labels not in found:
                try:
                    found[labels] = cache.usage()
                except HiCacheError:
                    continue  # it cannot tell: absent, as a metric that is not known should be
        self._usages = found


def mount(registry: CollectorRegistry = REGISTRY) -> Collector:
    """Add hicache's metrics to a registry, the default one of prometheus_client unless told.

    Raises:
        ValueError: they are in it already.
    """
    if any(isinstance(found, Collector) for found in list(registry._collector_to_names)):
        raise ValueError("hicache's metrics are in this registry already")
    collector = Collector()
    registry.register(collector)
    return collector


def serve(port: int = 0, address: str = "127.0.0.1") -> tuple[HTTPServer, threading.Thread]:
    """Serve hicache's metrics alone over HTTP, in a daemon thread; port 0 takes a free one.

    Give the server (``server.server_port``, ``server.shutdown()``) and its thread.

    Raises:
        OSError: the port is taken, or not this user's.
    """
    return start_http_server(port, address, registry=_own_registry())


def asgi_app() -> Any:
    """Give an ASGI application that serves hicache's metrics alone: ``app.mount("/hicache", asgi_app())``."""
    return make_asgi_app(registry=_own_registry())


def _own_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    mount(registry)
    return registry
