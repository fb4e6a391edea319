"""hicache-core: the storage contract for KV-cache pages, and what finds and drives its backends.

``HiCache`` is what engines use; ``HiCacheStorage`` is what backends implement;
``StorageBackendFactory`` gets from a name to an instance. Names load on first
use, so that a plugin's light module costs no more than the names it imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_core.cache import HiCache
    from hicache_core.capabilities import Capabilities
    from hicache_core.errors import (
        BackendTimeout,
        BackendUnavailable,
        HiCacheError,
        InvalidArgument,
        StorageClosed,
        StorageNotOpened,
        UnsupportedOperation,
    )
    from hicache_core.factory import StorageBackendFactory
    from hicache_core.identity import Component, Identity, Namespace, Placement, Shard
    from hicache_core.memory import HostPool, Pages, Segment
    from hicache_core.probe import ComponentQuery, Hit
    from hicache_core.spec import API_VERSION, BackendSpec, Requirement
    from hicache_core.status import Status
    from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig, Usage
    from hicache_core.upkeep import NamespaceUse, Verified

__all__ = [
    "API_VERSION",
    "BackendSpec",
    "BackendTimeout",
    "BackendUnavailable",
    "Capabilities",
    "Component",
    "ComponentQuery",
    "HiCache",
    "HiCacheError",
    "HiCacheStorage",
    "HiCacheStorageConfig",
    "Hit",
    "HostPool",
    "Identity",
    "InvalidArgument",
    "Namespace",
    "NamespaceUse",
    "Pages",
    "Placement",
    "Requirement",
    "Segment",
    "Shard",
    "Status",
    "StorageBackendFactory",
    "StorageClosed",
    "StorageNotOpened",
    "UnsupportedOperation",
    "Usage",
    "Verified",
]

_HOMES = {
    "cache": ("HiCache",),
    "capabilities": ("Capabilities",),
    "errors": (
        "BackendTimeout",
        "BackendUnavailable",
        "HiCacheError",
        "InvalidArgument",
        "StorageClosed",
        "StorageNotOpened",
        "UnsupportedOperation",
    ),
    "factory": ("StorageBackendFactory",),
    "identity": ("Component", "Identity", "Namespace", "Placement", "Shard"),
    "memory": ("HostPool", "Pages", "Segment"),
    "probe": ("ComponentQuery", "Hit"),
    "spec": ("API_VERSION", "BackendSpec", "Requirement"),
    "status": ("Status",),
    "storage": ("HiCacheStorage", "HiCacheStorageConfig", "Usage"),
    "upkeep": ("NamespaceUse", "Verified"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("hicache-core")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
