"""HiCacheNixl: KV pages in files or S3 objects, moved by NIXL.

Theory of operation. A page becomes one file or one object: its bytes and a
trailer of 64 (trailer.py). Everything that NIXL is not trusted with is done
around it: existence and sizes are asked of the file system or of S3 itself,
files appear by rename, and a page is OK only when its trailer and checksum
agree. files.py and objects.py are the two kinds of store behind one small
interface; agents.py lends each running transfer an agent of its own.

Facts about NIXL are of nixl-cu12 1.5.1; docs/nixl.md lists the defects that
this code works around, and tests/test_defects.py shows each.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

from hicache_core import HiCacheStorage, HiCacheStorageConfig, HostPool, Pages, Status, Usage
from hicache_core.errors import BackendUnavailable, InvalidPages
from hicache_core.mounts import file_system_of, is_network
from hicache_nixl._native import Agent, load, note
from hicache_nixl.agents import Agents
from hicache_nixl.budget import Budget
from hicache_nixl.byname import MOST, ByName, Remembered
from hicache_nixl.choice import Choice, choose, parameters
from hicache_nixl.filemoves import Mover
from hicache_nixl.files import FileStore
from hicache_nixl.folders import Folders
from hicache_nixl.lanes import Lanes
from hicache_nixl.options import NixlOptions
from hicache_nixl.spec import SPEC

#: Keys that are looked for before a miss among them ends the search for a prefix.
LOOK_AHEAD = 32

_ON_DEVICES = ("GDS", "GDS_MT")


class PageStore(Protocol):
    """What files and objects have in common: the verbs, behind the gate, with a deadline."""

    def know(self, pools: Sequence[HostPool]) -> None: ...
    def contains(self, keys: Sequence[str], deadline: float) -> list[Status]: ...
    def get(self, keys: Sequence[str], locs: Pages, deadline: float) -> list[Status]: ...
    def set(self, keys: Sequence[str], locs: Pages, deadline: float) -> list[Status]: ...
    def remove(self, keys: Sequence[str], deadline: float) -> list[Status]: ...
    def touch(self, keys: Sequence[str]) -> None: ...
    def clear(self, deadline: float) -> int: ...
    def usage(self, deadline: float) -> Usage: ...
    def close(self) -> None: ...
    def abandon_in_child(self) -> None: ...


class HiCacheNixl(HiCacheStorage):
    """See hicache_core.HiCacheStorage for what each verb promises."""

    spec = SPEC
    options: NixlOptions

    def __init__(self, config: HiCacheStorageConfig, options: NixlOptions) -> None:
        super().__init__(config, options)
        self._store: PageStore | None = None
        #: After open(): the NIXL plugin that was chosen, and why.
        self.choice: Choice | None = None

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        self._gate.check_new()
        deadline = self._deadline()
        choice = choose(self.options, pools)
        wanted = parameters(choice.plugin, self.options)
        nixl = load(self.options.library)
        note("nixl: plugin %s, since %s", choice.plugin, choice.reason)
        agents = Agents(lambda: Agent(nixl, choice.plugin, wanted))
        try:
            store = self._open_objects(agents, deadline) if choice.plugin == "OBJ" else None
            self._store = store or self._open_files(choice.plugin, agents, deadline)
            for pool in pools:
                self._check_device(pool)
            self._store.know(pools)
            agents.give(agents.take(deadline))  # what cannot work is found now
        except BaseException:
            self._release()
            agents.close()
            raise
        self.choice = choice
        super().open(pools)

    def add_pool(self, pool: HostPool) -> None:
        with self._gate:
            self._check_device(pool)
            super().add_pool(pool)
            self._opened().know(list(self._pools.values()))

    def drop_pool(self, pool: HostPool) -> None:
        with self._gate:
            super().drop_pool(pool)
            self._opened().know(list(self._pools.values()))

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            return self._opened().contains(keys, self._deadline()) if keys else []

    def batch_exists(self, keys: Sequence[str]) -> int:
        with self._gate:
            run, deadline = 0, self._deadline()
            for start in range(0, len(keys), LOOK_AHEAD):  # a prefix mostly ends early
                for status in self._opened().contains(keys[start : start + LOOK_AHEAD], deadline):
                    if status is not Status.OK:
                        return run
                    run += 1
            return run

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs, writes_slots=True)
            return self._opened().get(keys, locs, self._deadline()) if keys else []

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            return self._opened().set(keys, locs, self._deadline()) if keys else []

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            return self._opened().remove(keys, self._deadline()) if keys else []

    def touch(self, keys: Sequence[str]) -> None:
        with self._gate:
            self._opened().touch(keys)

    def clear(self) -> int:
        with self._gate:
            return self._opened().clear(self._deadline())

    def usage(self) -> Usage:
        with self._gate:
            return self._opened().usage(self._deadline())

    def close(self) -> None:
        self._drain()
        self._release()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        store, self._store = self._store, None
        if store is not None:
            store.abandon_in_child()

    def _open_files(self, plugin: str, agents: Agents, deadline: float) -> PageStore:
        options = self.options
        folders = Folders(options.folders, self.config.namespace)
        folders.prepare()
        on_device = plugin in _ON_DEVICES
        direct = options.direct_io or on_device
        # By name nothing but a checksum tells what was read, and NIXL opens no file past the page cache.
        by_name = plugin == "POSIX" and options.checksum and not direct
        remembered = Remembered(MOST if by_name else 0)
        budget = Budget.open(folders, options.capacity, deadline, remembered.forget)
        kinds = {file_system_of(folder) or "an unknown file system" for folder in options.folders}
        network = any(map(is_network, options.folders))
        self.capabilities = self._narrowed(
            device_memory=on_device,
            checksum=options.checksum,
            deadline="none" if network else "hold",
            max_segments=options.in_flight - 1,
            transport=f"{plugin} on {', '.join(sorted(kinds))}",
        )
        mover = Mover(
            folders,
            remembered,
            direct=direct,
            checksums=options.checksum,
            fsync=options.fsync,
            max_descriptors=options.in_flight,
        )
        return FileStore(folders, agents, budget, mover, Lanes(options.lanes), ByName(remembered))

    def _open_objects(self, agents: Agents, deadline: float) -> PageStore:
        from hicache_nixl.objects import ObjectStore

        self.capabilities = self._narrowed(
            eviction="none",
            device_memory=False,
            zero_copy=False,
            checksum=self.options.checksum,
            deadline="bounce",
            transport=f"S3 at {self.options.endpoint or self.options.region}",
        )
        store = ObjectStore(self.options, self.config.namespace, agents)
        store.prepare(deadline)
        return store

    def _narrowed(self, **changes: Any) -> Any:
        return dataclasses.replace(self.spec.capabilities, **changes)

    def _check_device(self, pool: HostPool) -> None:
        if pool.device != "cpu" and not self.capabilities.device_memory:
            raise InvalidPages(
                f"the pool of component '{pool.component.name}' lies on an accelerator",
                value=f"{pool.device}; NIXL's plugin reaches host memory only",
                remedy="Set plugin to GDS_MT or GDS, or give a pool in host memory.",
            )

    def _deadline(self) -> float:
        return time.monotonic() + self.config.timeout_s

    def _opened(self) -> PageStore:
        store = self._store  # a close() that has given up waiting takes it away under a running verb
        if store is None:
            raise BackendUnavailable("'nixl' was closed during the call", remedy="Open a new instance.")
        return store

    def _release(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
