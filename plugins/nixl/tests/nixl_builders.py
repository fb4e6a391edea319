"""What the tests of hicache-nixl arrange with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hicache_conformance.builders import Arena, in_segments, page_bytes
from hicache_core import (
    Component,
    HiCacheStorageConfig,
    HostPool,
    Identity,
    Namespace,
    Placement,
    Segment,
)
from hicache_nixl._native import Scratch
from hicache_nixl.options import NixlOptions
from hicache_nixl.storage import HiCacheNixl

__all__ = [  # for the programs of tests, which import everything
    "Arena",
    "Slots",
    "a_component",
    "a_config",
    "a_storage",
    "an_arena",
    "as_a_stranger",
    "file_of",
    "keys_of",
    "open_descriptors",
    "page_bytes",
    "require",
    "stored",
]

NBYTES = 8192


def require(reason: str | None) -> None:
    """Skip where something is missing; in CI without excuse."""
    if reason and os.environ.get("HICACHE_CI_NIXL_REQUIRED"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def a_component(nbytes: int = NBYTES, name: str = "kv", shard: Any = "whole") -> Component:
    return Component(name, shard=shard, byte_order="page_first", format="bf16", page_nbytes=nbytes)


def a_config(
    timeout_s: float = 10.0, placement: Placement | None = None, **identity: Any
) -> HiCacheStorageConfig:
    who = Identity.for_tests(**identity)
    return HiCacheStorageConfig(
        namespace=Namespace.of(who), identity=who, placement=placement or Placement(), timeout_s=timeout_s
    )


def a_storage(config: HiCacheStorageConfig | None = None, **options: Any) -> HiCacheNixl:
    return HiCacheNixl(config or a_config(), NixlOptions(**options))


def an_arena(
    pages: int, nbytes: int = NBYTES, segments: int = 1, component: Component | None = None
) -> Arena:
    return Arena(component or a_component(nbytes), pages, in_segments(segments))


class Slots:
    """Slots on page boundaries, which O_DIRECT reaches: an arena's are nowhere in particular."""

    def __init__(self, count: int, nbytes: int, segments: int = 1, stride: int | None = None) -> None:
        each = nbytes // segments
        self.nbytes, self._stride = nbytes, stride or each
        self._starts = [part * count * self._stride for part in range(segments)]
        self._each = each
        self.memory = Scratch(segments * count * self._stride)
        base = self.memory.address
        cut = tuple(Segment(base + start, self._stride, each) for start in self._starts)
        self.pool = HostPool(a_component(nbytes), cut, count, owner=self.memory)

    def _views(self, index: int) -> list[memoryview]:
        places = [start + index * self._stride for start in self._starts]
        return [self.memory.view[place : place + self._each] for place in places]

    def __getitem__(self, index: int) -> bytes:
        return b"".join(self._views(index))

    def stored(self, storage: HiCacheNixl, *labels: str) -> list[str]:
        """Store pages from the first slots; give their keys."""
        keys = self.pool.component.keys(list(labels))
        for index, key in enumerate(keys):
            page = page_bytes(key, self.nbytes)
            for part, view in enumerate(self._views(index)):
                view[:] = page[part * self._each : (part + 1) * self._each]
        assert storage.batch_set(keys, self.pool.pages(range(len(keys)))) == [1] * len(keys)
        return keys


def keys_of(arena: Arena, *labels: str) -> list[str]:
    return arena.component.keys(list(labels))


def stored(storage: HiCacheNixl, arena: Arena, keys: list[str]) -> None:
    """Fill the first slots with their keys' pages and store them."""
    for index, key in enumerate(keys):
        arena.fill(index, page_bytes(key, arena.nbytes))
    assert storage.batch_set(keys, arena.pages(range(len(keys)))) == [1] * len(keys)
    arena.freeze()


def file_of(folder: Path, storage: HiCacheNixl, key: str) -> Path:
    (found,) = (folder / storage.config.namespace.id).glob(f"??/{key}")
    return found


def as_a_stranger(storage: HiCacheNixl) -> HiCacheNixl:
    """Have it look at files anew, as a process does that neither wrote nor read them."""
    storage._store._by_name.remembered.clear()
    return storage


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
