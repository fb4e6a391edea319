"""What the tests arrange with: arenas, keys, storages on the simulator."""

from __future__ import annotations

import time
from typing import Any

from hicache_conformance.builders import Arena
from hicache_core import (
    Component,
    HiCacheStorageConfig,
    HostPool,
    Identity,
    Namespace,
    Placement,
    StorageBackendFactory,
)
from hicache_eic.harness import EicHarness
from hicache_eic.storage import EICStorage

NBYTES = 4096


def component(nbytes: int = NBYTES, name: str = "kv") -> Component:
    return Component(name, shard="whole", byte_order="page_first", format="bf16", page_nbytes=nbytes)


def an_arena(pages: int = 8, nbytes: int = NBYTES) -> Arena:
    """Make a pool of canaries whose slot i holds the byte i + 1."""
    arena = Arena(component(nbytes), pages)
    for index in range(pages):
        arena.fill(index, bytes([index + 1]) * nbytes)
    arena.freeze()
    return arena


def keys_of(count: int, label: str = "page") -> list[str]:
    return component().keys([f"{label}-{i}" for i in range(count)])


def a_config(timeout_s: float = 5.0, tenant: str | None = None, device: str = "cpu") -> HiCacheStorageConfig:
    identity = Identity.for_tests(tenant=tenant)
    return HiCacheStorageConfig(
        namespace=Namespace.of(identity),
        identity=identity,
        placement=Placement(device=device),
        timeout_s=timeout_s,
    )


def soon(seconds: float = 5.0) -> float:
    """Give a deadline."""
    return time.monotonic() + seconds


class Opener:
    """Opens storages on a simulator, and closes them; each opener has a namespace of its own."""

    _count = 0

    def __init__(self, simulator: EicHarness) -> None:
        Opener._count += 1
        self.simulator = simulator
        self.tenant = f"test-{Opener._count}"
        self.opened: list[EICStorage] = []

    def __call__(
        self, *arenas: Arena, timeout_s: float = 5.0, device: str = "cpu", tenant: str = "", **options: Any
    ) -> EICStorage:
        config = a_config(timeout_s, tenant or self.tenant, device)
        pools: list[HostPool] = [arena.pool for arena in arenas]
        given = self.simulator.options() | options
        storage = StorageBackendFactory.create_backend("eic", config, pools, **given)
        assert isinstance(storage, EICStorage)
        self.opened.append(storage)
        return storage
