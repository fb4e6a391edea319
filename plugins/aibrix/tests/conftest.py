"""Builders for the tests that need the real library."""

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

Opener = Callable[..., HiCacheStorage]


def needed(module: str) -> Any:
    """Import what a test needs; without it the test is skipped, and fails where .ci/env/aibrix runs it."""
    if os.environ.get("HICACHE_CI_AIBRIX_REQUIRED"):
        return importlib.import_module(module)
    return pytest.importorskip(module, reason="needs pip install 'hicache-aibrix[aibrix]'")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Open storages on one root; closed after the test."""
    needed("aibrix_kvcache")
    with ExitStack() as after:

        def open_one(pool: HostPool, kind: str, timeout_s: float = 5.0, **identity: Any) -> HiCacheStorage:
            whose = Identity.for_tests(**identity)
            config = HiCacheStorageConfig(
                namespace=Namespace.of(whose), identity=whose, placement=Placement(), timeout_s=timeout_s
            )
            options = {"root": str(tmp_path / kind), "backend": kind}
            storage = StorageBackendFactory.load("aibrix", options).create(config)
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
