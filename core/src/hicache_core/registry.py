"""Which backends there are: one scan of entry points, and names registered in process.

Finding is apart from loading (factory.py): listing must work, and stay quick,
however broken some plugin is. A scan reads distributions' metadata and imports
nothing; a plugin's light spec module is imported when its name is asked for or
listed. importlib.metadata is imported on the first scan only.

Thread-safe: a lock guards the scan and the registered names.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import invalidate_caches
from typing import TYPE_CHECKING, Any

from hicache_core.errors import BackendBlocked, BackendConflict, BackendLoadError, BackendNotFound
from hicache_core.spec import BackendSpec

if TYPE_CHECKING:
    from importlib.metadata import Distribution

ENTRY_POINT_GROUP = "hicache.backends"
ALLOW_VARIABLE = "HICACHE_BACKENDS_ALLOW"
DENY_VARIABLE = "HICACHE_BACKENDS_DENY"

#: Known backends and what to type where they are not installed; no other line of core names a backend.
INSTALL_HINTS: Mapping[str, str] = {
    "file": "pip install hicache-file",
    "nixl": "pip install 'hicache[nixl]'",
    "mooncake": "pip install 'hicache[mooncake-cpu]'  (or mooncake-cuda12, mooncake-cuda13)",
    "hf3fs": "pip install 'hicache[hf3fs]'",
    "aibrix": "pip install 'hicache[aibrix]'",
    "eic": "pip install 'hicache[eic]'",
    "lmcache": "pip install 'hicache[lmcache]'",
}


@dataclass(frozen=True, slots=True)
class Provider:
    """One distribution that provides a backend under a name, or a registration in process."""

    name: str
    target: str
    """``module:attribute`` of the BackendSpec, or of the storage class for a registration."""
    distribution: str
    version: str
    where: str
    """The folder it was found in."""
    registered: bool = False
    entry_point: Any = None


@dataclass(frozen=True, slots=True)
class Listed:
    """One row of a listing: a spec, or the error that stands in its place."""

    name: str
    provider: Provider | None
    spec: BackendSpec | None
    error: BackendLoadError | None


class Registry:
    """Names and their providers; ``registry`` below is the process's one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registered: dict[str, Provider] = {}
        self._scanned: dict[str, list[Provider]] = {}
        self._scanned_path: tuple[str, ...] | None = None

    def after_fork_in_child(self) -> None:
        """Take a new lock: the old one may be held by a thread that is not there any more."""
        self._lock = threading.Lock()

    def register(self, name: str, module_path: str, class_name: str) -> None:
        """Make a class known by name in this process; the last registration of a name wins."""
        with self._lock:
            self._registered[name] = Provider(
                name, f"{module_path}:{class_name}", "this process", "", module_path, registered=True
            )

    def unregister(self, name: str) -> None:
        """Forget a registration; an unknown name is ignored."""
        with self._lock:
            self._registered.pop(name, None)

    def refresh(self) -> None:
        """Scan anew on the next look-up: after an installation in a running process."""
        invalidate_caches()  # of sys.path's folders; else what was just installed may not be seen
        with self._lock:
            self._scanned_path = None

    def names(self) -> list[str]:
        """Give every name that is registered or installed, blocked ones included."""
        scanned = self._scan()
        with self._lock:
            return sorted({*self._registered, *scanned})

    def find(self, reference: str) -> Provider:
        """Find the one provider of ``name`` or ``name@distribution``.

        Raises:
            BackendNotFound, BackendConflict, BackendBlocked.
        """
        name, _, wanted = reference.partition("@")
        check_allowed(name)
        with self._lock:
            registered = self._registered.get(name)
        if registered is not None and not wanted:
            return registered
        providers = self._scan().get(name, [])
        if wanted:
            providers = [p for p in providers if _normalised(p.distribution) == _normalised(wanted)]
        if not providers:
            raise self._not_found(reference)
        if len(providers) > 1:
            raise BackendConflict(name, [(p.distribution, p.version, p.where) for p in providers])
        return providers[0]

    def providers(self, name: str) -> list[Provider]:
        """Give every provider of a name, so that a listing can show a conflict's sides."""
        with self._lock:
            registered = self._registered.get(name)
        return [registered] if registered else list(self._scan().get(name, []))

    def _not_found(self, reference: str) -> BackendNotFound:
        from difflib import get_close_matches  # of use only in this error

        name = reference.partition("@")[0]
        installed = self.names()
        known = [*installed, *(hint for hint in INSTALL_HINTS if hint not in installed)]
        close = get_close_matches(name, known, n=2)
        if name in installed:  # under another qualifier
            close = [f"{name}@{provider.distribution}" for provider in self.providers(name)]
        install = INSTALL_HINTS.get(name, "") if name not in installed else ""
        return BackendNotFound(reference, installed=installed, close=close, install=install)

    def _scan(self) -> dict[str, list[Provider]]:
        path = tuple(sys.path)
        with self._lock:
            if self._scanned_path != path:
                self._scanned = _installed_providers()
                self._scanned_path = path
            return self._scanned


def check_allowed(name: str) -> None:
    """Apply HICACHE_BACKENDS_ALLOW and HICACHE_BACKENDS_DENY (comma-separated names).

    Raises:
        BackendBlocked: naming the variable and its value.
    """
    allowed = _listed_in(ALLOW_VARIABLE)
    if allowed and name not in allowed:
        raise BackendBlocked(name, variable=ALLOW_VARIABLE, setting=os.environ[ALLOW_VARIABLE])
    if name in _listed_in(DENY_VARIABLE):
        raise BackendBlocked(name, variable=DENY_VARIABLE, setting=os.environ[DENY_VARIABLE])


def allowed_but_missing() -> list[str]:
    """Give the names in HICACHE_BACKENDS_ALLOW that nothing provides, for a warning."""
    known = set(registry.names())
    return [name for name in _listed_in(ALLOW_VARIABLE) if name not in known]


def _listed_in(variable: str) -> list[str]:
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


def _installed_providers() -> dict[str, list[Provider]]:
    """Read the entry points of every distribution, one provider a (name, distribution).

    A distribution can be seen twice (an editable install beside a wheel, one
    folder twice on sys.path): it counts once, as the first on the path, which is
    the one that an import would take.
    """
    from importlib import metadata

    found: dict[str, dict[str, Provider]] = {}
    for distribution in metadata.distributions():
        try:
            providers = _providers_of(distribution)
        except Exception:  # noqa: BLE001 - metadata left broken by somebody's installation hides no backend
            continue
        for provider in providers:
            found.setdefault(provider.name, {}).setdefault(_normalised(provider.distribution), provider)
    return {name: list(by_project.values()) for name, by_project in found.items()}


def _providers_of(distribution: Distribution) -> list[Provider]:
    points = [p for p in distribution.entry_points if p.group == ENTRY_POINT_GROUP]
    if not points:
        return []
    project, version = distribution.metadata["Name"] or "unknown", distribution.version
    where = str(distribution.locate_file(""))
    return [Provider(p.name, _target(p.value), project, version, where, entry_point=p) for p in points]


def _target(value: str) -> str:
    """Give ``module:attribute`` of an entry point's text, which may hold spaces and extras."""
    return "".join(value.partition("[")[0].split())


def _normalised(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")


#: The process's registry.
registry = Registry()
os.register_at_fork(after_in_child=registry.after_fork_in_child)
