"""The controller: pages come from and go to the store, whatever the store does."""

from __future__ import annotations

import threading

import pytest

from hicache_core import Component, HostPool
from hicache_core.status import Status
from hicache_engine import Engine, HiCacheController, PageAllocator, PrefetchPolicy, RadixCache, WritePolicy
from hicache_engine.hashing import page_hashes

PAGE_NBYTES = 64
PAGE_TOKENS = 4
WAIT_S = 10.0


class ToyCache:
    """What the controller needs of a HiCache, in a dictionary; its verbs can be made to wait or raise."""

    def __init__(self):
        self.pages = {}
        self.calls = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error = None
        self.failing = {"exists", "get", "set"}
        self.bad = ()

    def _pass(self, verb, hashes):
        self.calls.append((verb, len(hashes)))
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        self._fail(verb)

    def _fail(self, verb):
        if self.error is not None and verb in self.failing:
            raise self.error

    def exists(self, hashes):
        self.calls.append(("exists", len(hashes)))
        self._fail("exists")
        run = 0
        while run < len(hashes) and hashes[run] in self.pages:
            run += 1
        return run

    def get(self, hashes, pages):
        self._pass("get", hashes)
        statuses = []
        for position, page_hash in enumerate(hashes):
            if page_hash in self.bad:
                statuses.append(Status.CORRUPT)
                continue
            pages.views(position)[0][:] = self.pages[page_hash]
            statuses.append(Status.OK)
        return statuses

    def set(self, hashes, pages):
        self._pass("set", hashes)
        for position, page_hash in enumerate(hashes):
            self.pages.setdefault(page_hash, bytes(pages.views(position)[0]))
        return [Status.OK] * len(hashes)


def content(page_hash):
    return bytes.fromhex(page_hash) * (PAGE_NBYTES // 32)


def fill(hashes, pages):
    for position, page_hash in enumerate(hashes):
        pages.views(position)[0][:] = content(page_hash)


def a_pool(num_pages=16):
    kv = Component("kv", "whole", "page_first", "bytes", PAGE_NBYTES)
    return HostPool.from_buffer(bytearray(PAGE_NBYTES * num_pages), kv)


class Verifier:
    def __init__(self):
        self.seen = 0

    def __call__(self, hashes, pages):
        for position, page_hash in enumerate(hashes):
            assert bytes(pages.views(position)[0]) == content(page_hash)
        self.seen += len(hashes)


@pytest.fixture
def toy():
    cache = ToyCache()
    yield cache
    cache.gate.set()


@pytest.fixture
def engines():
    made = []

    def make(cache, num_pages=16, **options):
        verifier = Verifier()
        engine = Engine(a_pool(num_pages), PAGE_TOKENS, cache, fill, loaded=verifier, **options)
        engine.verifier = verifier
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.controller.shutdown(WAIT_S)


def tokens(pages, first=0):
    return list(range(first, first + pages * PAGE_TOKENS))


def counts(served):
    return (served.memory, served.store, served.computed, served.dropped)


def test_pages_come_back_from_memory_and_then_from_the_store(toy, engines):
    one = engines(toy)
    assert counts(one.serve(tokens(5))) == (0, 0, 5, 0)
    assert counts(one.serve(tokens(7))) == (5, 0, 2, 0)
    assert one.close()
    assert sorted(toy.pages) == sorted(page_hashes(tokens(7), PAGE_TOKENS))
    two = engines(toy)
    assert counts(two.serve(tokens(8))) == (0, 7, 1, 0)
    assert two.verifier.seen == 7
    assert two.close()


def test_a_page_is_backed_up_once(toy, engines):
    engine = engines(toy)
    engine.serve(tokens(3))
    engine.serve(tokens(5))
    engine.serve(tokens(5))
    assert engine.controller.settle(WAIT_S)
    assert [call for call in toy.calls if call[0] == "set"] == [("set", 3), ("set", 2)]


def test_adapters_share_nothing(toy, engines):
    engine = engines(toy)
    engine.serve(tokens(2), "a")
    assert engine.controller.settle(WAIT_S)
    assert counts(engine.serve(tokens(2), "b")) == (0, 0, 2, 0)


def test_a_damaged_page_cuts_the_prefix(toy, engines):
    first = engines(toy)
    first.serve(tokens(5))
    assert first.close()
    toy.bad = {page_hashes(tokens(5), PAGE_TOKENS)[2]}
    second = engines(toy)
    assert counts(second.serve(tokens(5))) == (0, 2, 3, 0)
    assert second.close()
    assert second.tree.locked_pages == 0


@pytest.mark.parametrize("verb", ["exists", "get", "set"])
def test_a_cache_that_raises_costs_pages_and_nothing_else(toy, engines, verb):
    first = engines(toy)
    first.serve(tokens(3))
    assert first.close()
    toy.error, toy.failing = RuntimeError("broken"), {verb}
    second = engines(toy)
    loaded = 3 if verb == "set" else 0
    assert counts(second.serve(tokens(4))) == (0, loaded, 4 - loaded, 0)
    assert second.controller.settle(WAIT_S)
    assert len(toy.pages) == (3 if verb == "set" else 4)
    toy.error = None
    assert counts(second.serve(tokens(6))) == (4, 0, 2, 0)
    assert second.close()
    assert second.tree.locked_pages == 0


def test_a_write_back_that_raises_costs_its_pages_and_the_eviction_goes_on(toy, engines):
    engine = engines(toy, num_pages=4, write_policy=WritePolicy.WRITE_BACK)
    engine.serve(tokens(4))
    toy.error = RuntimeError("broken")
    assert counts(engine.serve(tokens(4, first=1000))) == (0, 0, 4, 0)
    toy.error = None
    assert (toy.pages, engine.tree.locked_pages, engine.tree.total_pages) == ({}, 0, 4)
    assert counts(engine.serve(tokens(4))) == (0, 0, 4, 0)
    assert sorted(toy.pages) == sorted(page_hashes(tokens(4, first=1000), PAGE_TOKENS))


def test_best_effort_does_not_wait_and_reuses_no_page_in_flight(toy, engines):
    first = engines(toy)
    first.serve(tokens(4))
    assert first.close()
    toy.gate.clear()
    toy.entered.clear()
    second = engines(toy, num_pages=8, prefetch_policy=PrefetchPolicy.BEST_EFFORT)
    tree, controller = second.tree, second.controller
    match = tree.match_prefix(tokens(4))
    prefetch = controller.prefetch(tokens(4), None, match)
    assert toy.entered.wait(WAIT_S)
    assert controller.ready(prefetch)
    assert controller.finish(prefetch) == 0
    assert tree.allocator.available == 4  # the four in flight are not free yet
    assert controller.pending == 1
    toy.gate.set()
    assert prefetch.idle.wait(WAIT_S)
    controller.poll()
    assert (tree.allocator.available, controller.pending) == (8, 0)


def test_the_timeout_policy_starts_with_what_is_there(toy):
    now = [0.0]
    pool = a_pool()
    tree = RadixCache(PageAllocator(16), PAGE_TOKENS)
    controller = HiCacheController(
        pool, tree, toy, prefetch_policy=PrefetchPolicy.TIMEOUT, batch_pages=2, clock=lambda: now[0]
    )
    for page_hash in page_hashes(tokens(4), PAGE_TOKENS):
        toy.pages[page_hash] = content(page_hash)
    toy.gate.clear()
    prefetch = controller.prefetch(tokens(4), None, tree.match_prefix(tokens(4)))
    assert toy.entered.wait(WAIT_S)
    assert not controller.ready(prefetch)
    now[0] = 1.0 + 0.25 * 16 / 1024
    assert controller.ready(prefetch)
    toy.gate.set()
    assert prefetch.idle.wait(WAIT_S)
    assert controller.finish(prefetch) == 4
    assert controller.shutdown(WAIT_S)
    assert tree.allocator.available == 12


def test_write_back_stores_a_page_when_it_leaves_memory(toy, engines):
    engine = engines(toy, num_pages=4, write_policy=WritePolicy.WRITE_BACK)
    engine.serve(tokens(4))
    assert toy.pages == {}
    engine.serve(tokens(4, first=1000))
    assert sorted(toy.pages) == sorted(page_hashes(tokens(4), PAGE_TOKENS))
    assert counts(engine.serve(tokens(4))) == (0, 4, 0, 0)
    assert engine.verifier.seen == 4


def test_a_prefix_larger_than_memory_keeps_its_beginning(toy, engines):
    engine = engines(toy, num_pages=4)
    assert counts(engine.serve(tokens(6))) == (0, 0, 6, 2)
    assert counts(engine.serve(tokens(6))) == (4, 0, 2, 2)


def test_detach_waits_for_a_running_call_and_attach_goes_on(toy, engines):
    engine = engines(toy)
    controller = engine.controller
    toy.gate.clear()
    engine.serve(tokens(2))
    assert toy.entered.wait(WAIT_S)
    assert not controller.detach(0.05)
    toy.gate.set()
    assert controller.detach(WAIT_S)
    assert not controller.attached
    assert counts(engine.serve(tokens(3))) == (2, 0, 1, 0)
    assert controller.settle(WAIT_S)
    other = ToyCache()
    controller.attach(other)
    engine.serve(tokens(5))
    assert controller.settle(WAIT_S)
    assert sorted(other.pages) == sorted(page_hashes(tokens(5), PAGE_TOKENS)[3:])


def test_shutdown_in_the_middle_of_both_threads_work_ends_both(toy, engines):
    first = engines(toy)
    first.serve(tokens(4))
    assert first.close()
    toy.gate.clear()
    toy.entered.clear()
    second = engines(toy)
    tree, controller = second.tree, second.controller
    prefetch = controller.prefetch(tokens(4), None, tree.match_prefix(tokens(4)))
    assert toy.entered.wait(WAIT_S)
    pages = tree.allocator.take(2)
    tree.insert(tokens(2, first=500), pages)
    toy.entered.clear()
    controller.backup(tokens(2, first=500), None)
    assert toy.entered.wait(WAIT_S)
    assert not controller.shutdown(0.05)
    toy.gate.set()
    assert prefetch.idle.wait(WAIT_S)
    assert controller.shutdown(WAIT_S)
    controller.finish(prefetch)
    assert tree.locked_pages == 0
    assert controller.pending == 0


@pytest.mark.parametrize("work", ["prefetch", "backup"])
def test_work_that_meets_a_shutdown_from_another_thread_is_not_left_waiting(toy, engines, monkeypatch, work):
    """Queued behind the thread's end it would never be idle, and its pages locked for ever."""
    engine = engines(toy)
    tree, controller = engine.tree, engine.controller
    tree.insert(tokens(2), tree.allocator.take(2))
    lock = tree.lock

    def meanwhile(node):
        other = threading.Thread(target=controller.shutdown, args=(WAIT_S,))
        other.start()
        other.join(WAIT_S)
        lock(node)

    monkeypatch.setattr(tree, "lock", meanwhile)
    if work == "prefetch":
        assert controller.prefetch(tokens(4), None, tree.match_prefix(tokens(4))) is None
    else:
        controller.backup(tokens(2), None)
    assert controller.settle(0.0)
    assert (tree.locked_pages, tree.allocator.available, controller.pending) == (0, 14, 0)


def test_page_hashes_cover_what_came_before_and_the_key():
    whole = page_hashes(range(12), 4)
    assert page_hashes(range(11), 4) == whole[:2]
    assert page_hashes(range(4, 12), 4, parent=whole[0]) == whole[1:]
    assert (
        len({*whole, *page_hashes(range(12), 4, extra_key="x"), *page_hashes(range(12), 4, extra_key="")})
        == 9
    )
    # Frozen: changing the scheme orphans every store; HASH_SCHEME would have to change with it.
    assert whole[0] == "6281ad05284fc6eadfd0e144a332c810192965bc6e5c35342c6aac791a715683"
