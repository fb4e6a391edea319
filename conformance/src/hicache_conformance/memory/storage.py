"""MemoryStorage: pages as bytes in a dictionary, in this process or in a server.

Theory of operation. A set gathers each page's segments into private bytes and
hands the batch to the store; a get takes private bytes from the store and
scatters them into the slots. Both copies happen in the calling thread, so that
no slot is touched after a verb has returned (C11), and a batch is one call of
the store, so that results are aligned by construction (C1).

What a backend must do beyond moving bytes is marked by its clause.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakValueDictionary

from hicache_conformance.memory.client import RemoteStore
from hicache_conformance.memory.options import MemoryOptions
from hicache_conformance.memory.spec import SPEC
from hicache_conformance.memory.store import Store
from hicache_core import (
    BackendTimeout,
    BackendUnavailable,
    HiCacheStorage,
    HiCacheStorageConfig,
    HostPool,
    Pages,
    Status,
    Usage,
)

_T = TypeVar("_T")

#: Stores of this process by name; one lives as long as an instance holds it.
_stores: WeakValueDictionary[str, Store] = WeakValueDictionary()
_stores_lock = threading.Lock()


class MemoryStorage(HiCacheStorage):
    """See hicache_core.HiCacheStorage for what each verb promises."""

    spec = SPEC
    options: MemoryOptions

    def __init__(self, config: HiCacheStorageConfig, options: MemoryOptions) -> None:
        super().__init__(config, options)
        self._namespace = config.namespace.id
        self._store: Store | RemoteStore | None = None

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        self._gate.check_new()
        promised = self.spec.capabilities
        if self.options.server is None:
            store = self._store = store_of_this_process(self.options)
            self.capabilities = dataclasses.replace(
                promised, shared=False, persistent=False, durable=False, eviction=store.eviction
            )
        else:
            remote = RemoteStore(self.options.server, self.config.timeout_s)
            eviction, keeps = remote.hello()
            self.capabilities = dataclasses.replace(
                promised, persistent=keeps, durable=keeps, eviction=eviction
            )
            self._store = remote
        super().open(pools)

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            if not keys:  # C7: an empty batch reaches no server
                return []
            return self._statuses(len(keys), lambda store: store.contains(self._namespace, keys))

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs, writes_slots=True)
            if not keys:
                return []
            found: list[tuple[Status, bytes]] = []

            def fetch(store: Store | RemoteStore) -> list[Status]:
                found.extend(store.get(self._namespace, keys, locs.nbytes))
                return [status for status, _ in found]

            statuses = self._statuses(len(keys), fetch)
            for position, (status, value) in enumerate(found):
                if status is Status.OK:  # C2: the whole page into its own slot, and into no other
                    _scatter(value, locs.views(position))
            return statuses

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            if not keys:
                return []
            values = [b"".join(locs.views(position)) for position in range(len(keys))]
            return self._statuses(len(keys), lambda store: store.set(self._namespace, keys, values))

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            if not keys:
                return []
            return self._statuses(len(keys), lambda store: store.remove(self._namespace, keys))

    def touch(self, keys: Sequence[str]) -> None:
        with self._gate:
            if keys and self.capabilities.eviction == "lru":
                self._statuses(0, lambda store: store.touch(self._namespace, keys) or [])

    def clear(self) -> int:
        with self._gate:
            return self._opened().clear(self._namespace)

    def usage(self) -> Usage:
        with self._gate:
            return self._opened().usage(self._namespace)

    def close(self) -> None:
        self._drain()
        self._release()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._release()

    def _release(self) -> None:
        store, self._store = self._store, None
        if isinstance(store, RemoteStore):
            store.close()

    def _statuses(self, count: int, call: Callable[[Store | RemoteStore], list[Status]]) -> list[Status]:
        """Run one call of the store; trouble with all of it is a status for each key (C10)."""
        try:
            return call(self._opened())
        except BackendTimeout:
            return [Status.TIMEOUT] * count
        except BackendUnavailable:
            return [Status.UNAVAILABLE] * count

    def _opened(self) -> Store | RemoteStore:
        store = self._store  # a close() that has given up waiting takes it away under a running verb
        if store is None:
            raise BackendUnavailable("'memory' was closed during the call")
        return store


def store_of_this_process(options: MemoryOptions) -> Store:
    """Find or make the store that ``options.store`` names; its first opener decides capacity and eviction."""
    with _stores_lock:
        store = _stores.get(options.store)
        if store is None:
            store = _stores[options.store] = Store(options.capacity, options.eviction)
        return store


def _scatter(value: bytes, segments: list[memoryview]) -> None:
    start = 0
    for segment in segments:
        segment[:] = value[start : start + len(segment)]
        start += len(segment)
