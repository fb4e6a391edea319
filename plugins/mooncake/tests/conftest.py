"""One real master for the run, with a second client that holds the memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mooncake_builders import a_store

from hicache_core import HostPool
from hicache_mooncake._servers import Holder, Master
from hicache_mooncake.harness import MooncakeHarness
from hicache_mooncake.storage import MooncakeStore

Opens = Callable[..., MooncakeStore]


@pytest.fixture(scope="session")
def real() -> None:
    """Require the library and its master; in CI without excuse."""
    reason = MooncakeHarness().available()
    if reason and os.environ.get("HICACHE_CI_MOONCAKE_REQUIRED"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def master(real: None) -> Iterator[Master]:
    master = Master(client_ttl_s=5).start()
    yield master
    master.stop()


@pytest.fixture(scope="session")
def holder(master: Master) -> Iterator[Holder]:
    holder = Holder(master, 64 << 20)
    yield holder
    holder.stop()


@pytest.fixture
def own_master(real: None) -> Iterator[Master]:
    """A master that a test may pause and kill."""
    master = Master(client_ttl_s=5).start()
    yield master
    master.stop()


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Iterator[Opens]:
    """Open storages on a master; closed after the test, which gets a namespace of its own."""
    made: list[MooncakeStore] = []

    def open_one(master: Master, *pools: HostPool, **options: Any) -> MooncakeStore:
        options = {"master": master.address, "metrics": master.metrics, "segment_size": 0} | options
        options.setdefault("tenant_name", request.node.name)
        storage = a_store(options.pop("tenant_name"), options.pop("timeout_s", 5.0), **options)
        made.append(storage)
        storage.open(pools)
        return storage

    yield open_one
    for storage in made:
        storage.close()
