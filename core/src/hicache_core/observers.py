"""Observers: whether anybody watches, and what they are told.

Group ``hicache.observers``: each entry point resolves to an object with hooks
(hooks.py). They watch and cannot change a result. Without any, pluggy is never
imported and an operation pays for one comparison with None.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_core.notices import described, log_warning
from hicache_core.status import Status

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # the old one may be held by a thread that is not there any more


os.register_at_fork(after_in_child=_after_fork_in_child)


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
    global _scanned_path
    path = tuple(sys.path)
    with _lock:
        fresh, _scanned_path = _scanned_path != path, path
    if fresh:
        _load_installed()  # runs foreign code, which may come back here
    with _lock:
        return None if _hub is None or _hub.empty else _hub


def _load_installed() -> None:
    for point in _installed():
        try:
            register(point.load())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - no observer keeps a cache from opening
            reason = described(error)
            log_warning("observer '%s' (%s) left out: loading it raised %s", point.name, point.value, reason)


def _installed() -> list[EntryPoint]:
    from importlib import metadata

    found: list[EntryPoint] = []
    for distribution in metadata.distributions():
        try:
            points = distribution.entry_points
            found += [point for point in points if point.group == ENTRY_POINT_GROUP and point not in found]
        except Exception:  # noqa: BLE001 - metadata left broken by somebody's installation hides no observer
            continue
    return found


def _new_hub() -> Hub:
    from hicache_core.hooks import Hub

    return Hub()
