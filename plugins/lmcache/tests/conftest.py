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

        def open_one(pool: HostPool, l2: str, timeout_s: float = 5.0, **identity: Any) -> HiCacheStorage:
            whose = Identity.for_tests(tenant=str(tmp_path), **identity)
            config = HiCacheStorageConfig(
                namespace=Namespace.of(whose), identity=whose, placement=Placement(), timeout_s=timeout_s
            )
            options: dict[str, Any] = {"l2": l2}
            if l2 == "fs":
                options["root"] = str(tmp_path / "store")
            else:
                options["port"] = request.getfixturevalue("redis").port
            storage = StorageBackendFactory.load("lmcache", options).create(config)
            after.callback(storage.close)
            storage.open([pool])
            return storage

        yield open_one


def a_pool(pages: int = 8, nbytes: int = 4096, **changes: Any) -> HostPool:
    """Give a pool whose page i is filled with i + 1."""
    fields: dict[str, Any] = {"shard": "whole", "byte_order": "page_first", "format": "bf16"} | changes
    component = Component("kv", page_nbytes=nbytes, **fields)
    memory = bytearray(b"".join(bytes([i + 1]) * nbytes for i in range(pages)))
    return HostPool.from_buffer(memory, component)


def first_bytes(pool: HostPool, pages: range) -> list[int]:
    """Give the first byte of each page."""
    return [pool.pages(pages).views(i)[0][0] for i in range(len(pages))]
