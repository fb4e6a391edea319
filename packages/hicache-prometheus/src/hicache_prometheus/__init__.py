"""hicache-prometheus: what every HiCache of a process, or of a host, did and is doing, as Prometheus metrics.

Installed, it watches: its observer is found by an entry point, and counts into
a fixed table. Reading that table is up to the application, in one line of its
own: ``mount()`` (the default registry), ``serve(port)`` (a server of its own) or
``asgi_app()``. Engines of several processes set HICACHE_PROMETHEUS_DIR, and
``hicache exporter`` on the host serves all of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_prometheus.serving import asgi_app, mount, serve
    from hicache_prometheus.spans import trace

__all__ = ["asgi_app", "mount", "serve", "trace"]

_HOME_OF = {"asgi_app": "serving", "mount": "serving", "serve": "serving", "trace": "spans"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("hicache-prometheus")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
