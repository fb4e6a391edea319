"""Caches over stores that obey, and counts of one test alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hicache_core import Component, HiCache, HostPool, Identity, Placement, observers
from hicache_core.registry import registry

sys.path.insert(0, str(Path(__file__).parent))
from prom_toys import PAGE_NBYTES, ToyStorage

#: What these tests need that the other light tests do not; CI has all of it, and says so if not.
_NEEDED = ("hicache_prometheus", "prometheus_client")
_MISSING = [name for name in _NEEDED if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if _MISSING and not os.environ.get("CI") else []


def pytest_report_header() -> str | None:
    return f"hicache-prometheus is not tested: {', '.join(_MISSING)} not installed" if _MISSING else None


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the toy store answers in this test."""
    answers: dict[str, Any] = {}
    monkeypatch.setattr(ToyStorage, "script", answers)
    return answers


@pytest.fixture
def pool() -> HostPool:
    component = Component("kv", shard="whole", byte_order="opaque", format="bytes", page_nbytes=PAGE_NBYTES)
    return HostPool.from_buffer(bytearray(64 * PAGE_NBYTES), component)


@pytest.fixture
def open_cache(pool: HostPool, script: dict[str, Any]) -> Iterator[Callable[..., HiCache]]:
    """Open caches over the toy store; they are closed afterwards."""
    registry.register("toy", "prom_toys", "ToyStorage")
    opened: list[HiCache] = []

    def make(**identity: Any) -> HiCache:
        chosen = Identity.for_tests(**identity)
        opened.append(
            HiCache.open("toy", identity=chosen, placement=Placement(), pools=[pool], timeout_s=1.0)
        )
        return opened[-1]

    yield make
    for cache in opened:
        cache.close()
    registry.unregister("toy")


@pytest.fixture
def recorder() -> Iterator[Any]:
    """A recorder of this test's own, registered; the process's own one stays out of the way."""
    from hicache_prometheus.recorder import Recorder

    fresh = Recorder()
    observers.register(fresh)
    yield fresh
    observers.unregister(fresh)
