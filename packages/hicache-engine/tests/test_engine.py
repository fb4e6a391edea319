"""The engine over a real HiCache: every byte verified, whatever the backend does."""

from __future__ import annotations

import sys
import threading
import types
from typing import ClassVar

import pytest

from hicache_core import (
    BackendSpec,
    Capabilities,
    Component,
    HiCache,
    HiCacheStorage,
    HostPool,
    Identity,
    Placement,
    Segment,
    Status,
    StorageBackendFactory,
    Usage,
)
from hicache_core.registry import registry
from hicache_engine import Engine

PAGE_NBYTES = 256
PAGE_TOKENS = 4


class Shelf(HiCacheStorage):
    """Pages in a dictionary of the class; get and set go through ``Shelf.act`` first."""

    spec = BackendSpec(
        name="shelf",
        api=1,
        target="hicache_engine_shelf:Shelf",
        options="hicache_core.options:Options",
        capabilities=Capabilities(deadline="hold"),
    )
    pages: ClassVar[dict] = {}
    act = staticmethod(lambda verb: None)

    def batch_contains(self, keys):
        return [Status.OK if key in self.pages else Status.MISS for key in keys]

    def batch_get(self, keys, locs):
        self._check(keys, locs)
        type(self).act("get")
        return [self._get(key, locs.views(i)) for i, key in enumerate(keys)]

    def _get(self, key, views):
        if key not in self.pages:
            return Status.MISS
        at = 0
        for view in views:
            view[:] = self.pages[key][at : at + view.nbytes]
            at += view.nbytes
        return Status.OK

    def batch_set(self, keys, locs):
        self._check(keys, locs)
        type(self).act("set")
        for i, key in enumerate(keys):
            self.pages.setdefault(key, b"".join(locs.views(i)))
        return [Status.OK] * len(keys)

    def usage(self):
        return Usage(len(self.pages), 0, 0, None)


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setattr(Shelf, "pages", {})
    module = types.ModuleType("hicache_engine_shelf")
    module.Shelf = Shelf
    monkeypatch.setitem(sys.modules, module.__name__, module)
    StorageBackendFactory.register_backend("shelf", "hicache_engine_shelf", "Shelf")
    yield Shelf
    registry.unregister("shelf")


def layer_first(num_pages, layers=2):
    """K and V of each layer apart: four segments a page."""
    part = PAGE_NBYTES // (2 * layers)
    memory = bytearray(PAGE_NBYTES * num_pages)
    kv = Component("kv", "whole", "layer_first", "bytes", PAGE_NBYTES)
    whole = HostPool.from_buffer(memory, kv)
    base = whole.segments[0].address
    segments = [Segment(base + i * part * num_pages, part, part) for i in range(2 * layers)]
    return HostPool(kv, tuple(segments), num_pages, owner=whole)


def content(page_hash):
    return bytes.fromhex(page_hash) * (PAGE_NBYTES // 32)


def fill(hashes, pages):
    for position, page_hash in enumerate(hashes):
        at = 0
        for view in pages.views(position):
            view[:] = content(page_hash)[at : at + view.nbytes]
            at += view.nbytes


def verify(hashes, pages):
    for position, page_hash in enumerate(hashes):
        assert b"".join(pages.views(position)) == content(page_hash)


def an_engine(num_pages=16, timeout_s=5.0):
    pool = layer_first(num_pages)
    cache = HiCache.open(
        "shelf", identity=Identity.for_tests(), placement=Placement(), pools=[pool], timeout_s=timeout_s
    )
    return Engine(pool, PAGE_TOKENS, cache, fill, loaded=verify), cache


def tokens(pages):
    return list(range(pages * PAGE_TOKENS))


def test_a_second_engine_finds_what_the_first_one_stored(shelf):
    first, cache = an_engine()
    with cache:
        first.serve(tokens(6))
        assert first.close()
    second, cache = an_engine()
    with cache:
        served = second.serve(tokens(7))
        assert (served.memory, served.store, served.computed) == (0, 6, 1)
        assert second.close()


def test_a_backend_that_raises_is_computed_around(shelf, monkeypatch):
    def act(verb):
        raise OSError("no such device")

    monkeypatch.setattr(shelf, "act", staticmethod(act))
    engine, cache = an_engine()
    with cache:
        assert engine.serve(tokens(4)).computed == 4
        assert engine.close()
        assert cache.stats().verbs["set"].statuses == {Status.ERROR: 4}


def test_a_backend_that_hangs_costs_its_deadline_once(shelf, monkeypatch):
    first, cache = an_engine()
    with cache:
        first.serve(tokens(4))
        assert first.close()
    release = threading.Event()
    monkeypatch.setattr(shelf, "act", staticmethod(lambda verb: release.wait(30)))
    pool = layer_first(16)
    cache = HiCache.open(
        "shelf",
        identity=Identity.for_tests(),
        placement=Placement(),
        pools=[pool],
        timeout_s=0.2,
        options={"bounce": True},
    )
    second = Engine(pool, PAGE_TOKENS, cache, fill, loaded=verify)
    try:
        served = second.serve(tokens(5))
        assert (served.store, served.computed) == (0, 5)
        assert second.controller.settle(10.0)
        assert cache.stats().late >= 1
        assert second.tree.locked_pages == 0
    finally:
        release.set()
        second.close()
        cache.close()
