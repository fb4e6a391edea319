"""What the tests arrange with: options, configurations, pools of known bytes."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

from hicache_core import Component, HiCacheStorageConfig, HostPool, Identity, Namespace, Placement, Segment
from hicache_core.buffers import address_of, flat_view
from hicache_mooncake.options import MooncakeOptions
from hicache_mooncake.storage import MooncakeStore

NBYTES = 4096


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.01)
    return True


def a_component(nbytes: int = NBYTES) -> Component:
    return Component("kv", shard="whole", byte_order="page_first", format="bf16", page_nbytes=nbytes)


def a_pool(pages: int = 8, nbytes: int = NBYTES, fill: int = 0xA5, segments: int = 1) -> HostPool:
    """Make a pool; with several segments they lie one plane behind the other."""
    memory = mmap.mmap(-1, pages * nbytes)
    memory[:] = bytes([fill]) * (pages * nbytes)
    base, part = address_of(flat_view(memory)), nbytes // segments
    places = tuple(Segment(base + i * pages * part, part, part) for i in range(segments))
    return HostPool(a_component(nbytes), places, pages, owner=memory)


def content(pool: HostPool, page: int) -> bytes:
    return b"".join(bytes(view) for view in pool.pages([page]).views(0))


def fill(pool: HostPool, page: int, value: bytes) -> None:
    at = 0
    for view in pool.pages([page]).views(0):
        view[:] = value[at : at + len(view)]
        at += len(view)


def keys_of(*labels: str, nbytes: int = NBYTES) -> list[str]:
    return a_component(nbytes).keys([f"{label:0<64}" for label in labels])


def a_config(tenant: str = "tests", timeout_s: float = 5.0) -> HiCacheStorageConfig:
    identity = Identity.for_tests(tenant=tenant)
    return HiCacheStorageConfig(
        namespace=Namespace.of(identity), identity=identity, placement=Placement(), timeout_s=timeout_s
    )


def a_store(tenant: str = "tests", timeout_s: float = 5.0, **options: Any) -> MooncakeStore:
    """Build a storage, unopened."""
    return MooncakeStore(a_config(tenant, timeout_s), MooncakeOptions(**options))
