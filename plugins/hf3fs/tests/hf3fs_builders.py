"""What the tests arrange with: arenas, keys, storages on a root, reservations."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hicache_conformance.builders import Arena
from hicache_core import (
    Component,
    HiCacheStorageConfig,
    Identity,
    Namespace,
    Placement,
    StorageBackendFactory,
)
from hicache_hf3fs.metadata import Written, new_ticket
from hicache_hf3fs.metadata_local import LocalMetadata
from hicache_hf3fs.storage import HiCacheHF3FS

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


def a_config(timeout_s: float = 5.0, tenant: str | None = None) -> HiCacheStorageConfig:
    identity = Identity.for_tests(tenant=tenant)
    namespace = Namespace.of(identity)
    return HiCacheStorageConfig(
        namespace=namespace, identity=identity, placement=Placement(), timeout_s=timeout_s
    )


def soon(seconds: float = 5.0) -> float:
    """Give a deadline."""
    return time.monotonic() + seconds


def asked(url: str, body: bytes | None = None) -> tuple[int, str]:
    """Ask a server by GET, or by POST with a body; give status and text."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def store(metadata: LocalMetadata | Any, rank: str, names: list[str], nbytes: int = NBYTES) -> list[int]:
    """Reserve and confirm keys without writing anything; give their pages."""
    lease = new_ticket()
    wanted = [(name, "") for name in names]
    taken = metadata.reserve_and_allocate_page_indices(rank, wanted, lease=lease, deadline=soon())
    written = [
        Written(name, r.page, nbytes, None) for name, r in zip(names, taken, strict=True) if not r.existed
    ]
    metadata.confirm_write(rank, written, [], lease=lease, deadline=soon())
    return [reservation.page for reservation in taken]


class Held:
    """Makes calls of a function wait from now on, until ``go`` is set; ``entered`` tells that one waits."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.real = real = getattr(owner, name)

        def wait(*arguments: Any, **options: Any) -> Any:
            self.entered.set()
            self.go.wait(20)
            return real(*arguments, **options)

        self.free = partial(setattr, owner, name, real)
        patch.setattr(owner, name, wait)


class Opener:
    """Opens storages on one root with local metadata, and closes them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.opened: list[HiCacheHF3FS] = []

    def options(self, **options: Any) -> dict[str, Any]:
        given = {"root": str(self.root), "file_size": 64 * NBYTES} | options
        if given.get("client") == "usrbio":
            (self.root / "3fs-virt" / "iovs").mkdir(parents=True, exist_ok=True)
            given.setdefault("usrbio_module", "hicache_hf3fs.usrbio_double")
            given.setdefault("memory", 1 << 20)
        return given

    def __call__(
        self, *arenas: Arena, timeout_s: float = 5.0, tenant: str | None = None, **options: Any
    ) -> HiCacheHF3FS:
        config = a_config(timeout_s, tenant)
        pools = [arena.pool for arena in arenas]
        storage = StorageBackendFactory.create_backend("hf3fs", config, pools, **self.options(**options))
        assert isinstance(storage, HiCacheHF3FS)
        self.opened.append(storage)
        return storage
