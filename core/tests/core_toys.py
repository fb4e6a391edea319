"""Toy backends: one that is correct and keeps its pages in a dict, and one that misbehaves to order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ConfigDict

from hicache_core.capabilities import Capabilities
from hicache_core.memory import HostPool, Pages
from hicache_core.options import Options
from hicache_core.spec import API_VERSION, BackendSpec
from hicache_core.status import Status
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig, Usage

SPEC = BackendSpec(
    name="toy",
    api=API_VERSION,
    target="core_toys:ToyStorage",
    options="core_toys:ToyOptions",
    summary="pages in a dict",
    capabilities=Capabilities(remove=True, clear=True, deadline="hold"),
)


class ToyOptions(Options):
    """Two options whose names are also parameters of the factory."""

    name: str = ""
    config: str = ""
    size: int = 1


class ToyStorage(HiCacheStorage):
    """A correct store without a deadline of its own."""

    spec = SPEC

    def __init__(self, config: HiCacheStorageConfig, options: Any) -> None:
        super().__init__(config, options)
        self.pages: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            return [Status.OK if key in self.pages else Status.MISS for key in keys]

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs, writes_slots=True)
            return [self._get(key, locs.views(at)) for at, key in enumerate(keys)]

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            for at, key in enumerate(keys):
                self.pages.setdefault(key, b"".join(map(bytes, locs.views(at))))
            return [Status.OK] * len(keys)

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            return [Status.MISS if self.pages.pop(key, None) is None else Status.OK for key in keys]

    def clear(self) -> int:
        with self._gate:
            removed = len(self.pages)
            self.pages.clear()
            return removed

    def usage(self) -> Usage:
        with self._gate:
            size = sum(map(len, self.pages.values()))
            return Usage(len(self.pages), size, size, None)

    def _get(self, key: str, views: list[memoryview]) -> Status:
        content = self.pages.get(key)
        if content is None:
            return Status.MISS
        if len(content) != sum(view.nbytes for view in views):
            return Status.SIZE_MISMATCH
        at = 0
        for view in views:
            view[:] = content[at : at + view.nbytes]
            at += view.nbytes
        return Status.OK


class ScriptOptions(Options):
    """What the scripted backend is told by the test."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    script: Any = None


class Script:
    """What a scripted backend does: one callable a verb, instead of or around the toy's own.

    A verb's callable gets (proceed, *arguments) and returns or raises whatever
    the test wants; ``proceed()`` is the toy's own answer. ``calls`` counts.
    """

    def __init__(self, **verbs: Callable[..., Any]) -> None:
        self.verbs = verbs
        self.calls: list[tuple[str, int]] = []
        self.storages: list[ScriptedStorage] = []
        self.stores: dict[str, dict[str, bytes]] = {}
        self.capabilities: Capabilities | None = None

    def count(self, verb: str) -> int:
        return sum(name == verb for name, _ in self.calls)

    def run(self, verb: str, size: int, proceed: Callable[[], Any], *arguments: Any) -> Any:
        self.calls.append((verb, size))
        hook = self.verbs.get(verb)
        return proceed() if hook is None else hook(proceed, *arguments)


SCRIPTED = BackendSpec(
    name="scripted",
    api=API_VERSION,
    target="core_toys:ScriptedStorage",
    options="core_toys:ScriptOptions",
    capabilities=Capabilities(remove=True, clear=True, eviction="lru", deadline="hold"),
)


class ScriptedStorage(ToyStorage):
    """The toy with a script in front of each verb; pages survive in the script, by namespace."""

    spec = SCRIPTED

    def __init__(self, config: HiCacheStorageConfig, options: Any) -> None:
        super().__init__(config, options)
        self.script: Script = options.script or Script()
        self.script.storages.append(self)
        self.pages = self.script.stores.setdefault(config.namespace.id, {})
        self.script.run("init", 0, lambda: None)

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        def proceed() -> None:
            if self.script.capabilities is not None:
                self.capabilities = self.script.capabilities
            super(ScriptedStorage, self).open(pools)

        self.script.run("open", len(pools), proceed)

    def add_pool(self, pool: HostPool) -> None:
        self.script.run("add_pool", 1, lambda: super(ScriptedStorage, self).add_pool(pool), pool)

    def drop_pool(self, pool: HostPool) -> None:
        self.script.run("drop_pool", 1, lambda: super(ScriptedStorage, self).drop_pool(pool), pool)

    def batch_contains(self, keys: Sequence[str]) -> Any:
        proceed = super().batch_contains
        return self.script.run("contains", len(keys), lambda: proceed(keys), keys)

    def batch_exists(self, keys: Sequence[str]) -> Any:
        if "exists" not in self.script.verbs:
            return super().batch_exists(keys)
        return self.script.run(
            "exists", len(keys), lambda: super(ScriptedStorage, self).batch_exists(keys), keys
        )

    def batch_get(self, keys: Sequence[str], locs: Pages) -> Any:
        proceed = super().batch_get
        return self.script.run("get", len(keys), lambda: proceed(keys, locs), keys, locs)

    def batch_set(self, keys: Sequence[str], locs: Pages) -> Any:
        proceed = super().batch_set
        return self.script.run("set", len(keys), lambda: proceed(keys, locs), keys, locs)

    def batch_remove(self, keys: Sequence[str]) -> Any:
        proceed = super().batch_remove
        return self.script.run("remove", len(keys), lambda: proceed(keys), keys)

    def touch(self, keys: Sequence[str]) -> Any:
        return self.script.run("touch", len(keys), lambda: None, keys)

    def clear(self) -> Any:
        return self.script.run("clear", 0, super().clear)

    def usage(self) -> Any:
        return self.script.run("usage", 0, super().usage)

    def close(self) -> None:
        self.script.run("close", 0, super().close)
