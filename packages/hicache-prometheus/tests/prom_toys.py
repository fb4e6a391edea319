"""A store that keeps names and no bytes, and answers what a test scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hicache_core import BackendSpec, Capabilities, HiCacheStorage, HostPool, Pages, Status, Usage

PAGE_NBYTES = 4096


class ToyStorage(HiCacheStorage):
    """Keeps names in a set; ``script`` answers in its place where a test says so."""

    spec = BackendSpec(
        name="toy",
        api=1,
        target=f"{__name__}:ToyStorage",
        options="hicache_core.options:Options",
        capabilities=Capabilities(deadline="hold"),
    )
    script: ClassVar[dict[str, Callable[[Sequence[str]], Any]]] = {}

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        self.stored: set[str] = set()
        super().open(pools)

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        return [Status.OK if key in self.stored else Status.MISS for key in keys]

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return self.script["get"](keys) if "get" in self.script else self.batch_contains(keys)

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        if "set" in self.script:
            return self.script["set"](keys)
        self.stored.update(keys)
        return [Status.OK] * len(keys)

    def usage(self) -> Usage:
        if "usage" in self.script:
            self.script["usage"]([])
        return Usage(len(self.stored), len(self.stored) * PAGE_NBYTES, 123_456, 1_000_000)
