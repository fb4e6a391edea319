"""Builders for the tests that need the real library, and a Redis for those that need one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hicache_core import (
    Component,
    HiCacheStorage,
    HiCacheStorageConfig,
    HostPool,
    Identity,
    Namespace,
    Placement,
)
from hicache_core.factory import StorageBackendFactory
from hicache_lmcache.redis_server import RedisServer, program

Opener = Callable[..., HiCacheStorage]


def needed(module: str) -> Any:
    """Import what a test needs; without it the test is skipped, and fails where .ci/env/lmcache runs it."""
    if os.environ.get("HICACHE_CI_LMCACHE_REQUIRED"):
        return importlib.import_module(module)
    return pytest.importorskip(module, reason="needs pip install 'hicache-lmcache[lmcache]'")


@pytest.fixture
def lmcache() -> Any:
    """The library itself."""
    return needed("lmcache")


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """One redis-server for the run."""
    if program() is None and not os.environ.get("HICACHE_CI_LMCACHE_REQUIRED"):
        pytest.skip("needs apt-get install redis-server")
    server = RedisServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Open storages over files or Redis; closed after the test."""
    needed("lmcache")
    with ExitStack() as after:

        def open_one(
            pool: HostPool,
            l2: str,
            timeout_s: float = 5.0,
            *,
            l1_bytes: int = 0,
            network: bool | None = None,
            **identity: Any,
        ) -> HiCacheStorage:
            whose = Identity.for_tests(tenant=str(tmp_path), **identity)
            config = HiCacheStorageConfig(
                namespace=Namespace.of(whose), identity=whose, placement=Placement(), timeout_s=timeout_s
            )
            options: dict[str, Any] = {"l2": l2, "l1_bytes": l1_bytes, "network": network}
            if l2 == "fs":
                options["root"] = str(tmp_path / "store")
            else:
                options["port"] = request.getfixturevalue("redis").port
            storage = StorageBackendFactory.load("lmcache", options).create(config)
            after.callback(storage.close)
            storage.open([pool])
            return storage

        yield open_one


@pytest.fixture
def machine() -> Iterator[Any]:
    """Make machines whose caches share an LMCache engine when their names are one."""
    from .machines import LMCRadixCache, Machine

    from hicache_engine import PageAllocator  # isort: skip

    with ExitStack() as after:

        def make(
            name: str, kind: str = "mha", page: int = 4, chunk: int = 16, pages: int = 64, **more: Any
        ) -> tuple[Machine, LMCRadixCache]:
            it = Machine(kind, page, pages)
            options = {"cpu_nbytes": 64 << 20, **more}
            cache = LMCRadixCache(PageAllocator(pages), page, it.pools(), name, chunk_tokens=chunk, **options)
            after.callback(cache.close, 10.0)
            return it, cache

        yield make


@pytest.fixture
def name() -> str:
    """Give a namespace that no other test has."""
    from .machines import NAMES

    return f"ns{next(NAMES)}"


def a_pool(pages: int = 8, nbytes: int = 4096, **changes: Any) -> HostPool:
    """Give a pool whose page i is filled with i + 1."""
    fields: dict[str, Any] = {"shard": "whole", "byte_order": "page_first", "format": "bf16"} | changes
    component = Component("kv", page_nbytes=nbytes, **fields)
    memory = bytearray(b"".join(bytes([i + 1]) * nbytes for i in range(pages)))
    return HostPool.from_buffer(memory, component)


def first_bytes(pool: HostPool, pages: range) -> list[int]:
    """Give the first byte of each page."""
    return [pool.pages(pages).views(i)[0][0] for i in range(len(pages))]
