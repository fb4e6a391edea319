"""NIXL itself, a folder a test, and one SeaweedFS for the run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from nixl_builders import a_config, a_storage, require

from hicache_nixl.harness import NixlHarness, ObjectHarness
from hicache_nixl.seaweed import Seaweed
from hicache_nixl.storage import HiCacheNixl

Opens = Callable[..., HiCacheNixl]


#: The AWS SDK asks a server that is gone again for 25 s.
LEFT_BEHIND_S = 60.0


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """End when calls that were left behind have ended: what runs beside exit() may abort the process."""
    yield
    for thread in threading.enumerate():
        if thread.name == "hicache-nixl-abandoned":
            thread.join(LEFT_BEHIND_S)


@pytest.fixture(scope="session")
def nixl() -> None:
    """Require the library."""
    require(NixlHarness({}).available())


@pytest.fixture
def opened(nixl: None, tmp_path: Path) -> Iterator[Opens]:
    """Open storages, over files in a folder of the test unless it says otherwise; closed after it."""
    made: list[HiCacheNixl] = []

    def opens(*pools: Any, config: Any = None, **options: Any) -> HiCacheNixl:
        place = {} if "bucket" in options or "folders" in options else {"folders": (str(tmp_path / "kv"),)}
        storage = a_storage(config, **place, **options)
        made.append(storage)
        storage.open(pools)
        return storage

    yield opens
    for storage in made:
        storage.close()


@pytest.fixture(scope="session")
def seaweed() -> Iterator[Seaweed]:
    """A server that no test stops."""
    require(ObjectHarness({"plugin": "OBJ"}).available())
    server = Seaweed()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_seaweed() -> Iterator[Seaweed]:
    """A server that a test may pause and kill."""
    require(ObjectHarness({"plugin": "OBJ"}).available())
    server = Seaweed()
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def objects(opened: Opens, request: pytest.FixtureRequest) -> Opens:
    """Open storages over objects; each test has a namespace of its own."""

    def opens(server: Seaweed, *pools: Any, timeout_s: float = 10.0, **options: Any) -> HiCacheNixl:
        config = a_config(timeout_s, tenant=request.node.nodeid)
        return opened(*pools, config=config, **server.options(), **options)

    return opens
