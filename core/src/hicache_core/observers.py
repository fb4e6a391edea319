"""Observers: whether anybody watches, and what they are told.

Group ``hicache.observers``: each entry point resolves to an object with hooks
(hooks.py). They watch and cannot change a result. Without any, pluggy is never
imported and an operation pays for one comparison with None.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_core.notices import log_warning
from hicache_core.status import Status

if TYPE_CHECKING:
    from hicache_core.hooks import Hub

ENTRY_POINT_GROUP = "hicache.observers"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEvent:
    """One finished call of HiCache."""

    backend: str
    namespace: str
    verb: str
    component: str
    pages: int
    nbytes: int
    """Bytes of the pages that were OK (get and set)."""
    statuses: Mapping[Status, int]
    """Pages by outcome; for exists, OK are the leading hits and MISS the rest."""
    seconds: float


_lock = threading.Lock()
_hub: Hub | None = None
_scanned_path: tuple[str, ...] | None = None


def register(observer: object) -> None:
    """Add an observer of this process; every HiCache opened from here on tells it."""
    global _hub
    with _lock:
        if _hub is None:
            _hub = _new_hub()
        _hub.add(observer)


def unregister(observer: object) -> None:
    """Forget an observer; an unknown one is ignored."""
    with _lock:
        if _hub is not None:
            _hub.remove(observer)


def active() -> Hub | None:
    """Give the hub if anybody watches; entry points are read once a process and sys.path."""
    global _hub, _scanned_path
    path = tuple(sys.path)
    with _lock:
        if _scanned_path != path:
            _scanned_path = path
            _hub = _load_installed(_hub)
        return None if _hub is None or _hub.empty else _hub


def _load_installed(hub: Hub | None) -> Hub | None:
    from importlib import metadata

    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            observer = point.load()
        except Exception as error:  # noqa: BLE001 - a broken observer must not keep a cache from opening
            log_warning("observer '%s' (%s) left out: loading it raised %r", point.name, point.value, error)
            continue
        hub = hub or _new_hub()
        hub.add(observer, point.name)
    return hub


def _new_hub() -> Hub:
    from hicache_core.hooks import Hub

    return Hub()
