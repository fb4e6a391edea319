"""hicache-core: the storage contract for KV-cache pages, and what finds and drives its backends.

``HiCache`` is what engines use; ``HiCacheStorage`` is what backends implement;
``StorageBackendFactory`` gets from a name to an instance.
"""

from __future__ import annotations

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
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-core")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
