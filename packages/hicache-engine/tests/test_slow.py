"""The controller over a store that answers late, but does answer: each prefetch and each write policy."""

from __future__ import annotations

import random
import threading

import pytest

from hicache_core import Component, HostPool
from hicache_core.status import Status
from hicache_engine import Engine, HiCacheController, PageAllocator, PrefetchPolicy, RadixCache, WritePolicy
from hicache_engine.hashing import page_hashes

PAGE_NBYTES, PAGE_TOKENS, BATCH, WAIT_S = 64, 4, 2, 10.0


class SlowCache:
    """A store in a dictionary, whose answers to get and set come when the test says so, one at a time."""

    def __init__(self):
        self.pages = {}
        self.began = threading.Semaphore(0)
        self.answers = threading.Semaphore(0)

    def exists(self, hashes):
        return next((at for at, name in enumerate(hashes) if name not in self.pages), len(hashes))

    def _late(self):
        self.began.release()
        assert self.answers.acquire(timeout=WAIT_S)

    def get(self, hashes, pages):
        self._late()
        for position, page_hash in enumerate(hashes):
            pages.views(position)[0][:] = self.pages[page_hash]
        return [Status.OK] * len(hashes)

    def set(self, hashes, pages):
        self._late()  # a store that reads what it is given as late as it may
        for position, page_hash in enumerate(hashes):
            self.pages[page_hash] = bytes(pages.views(position)[0])
        return [Status.OK] * len(hashes)

    def next_call(self):
        assert self.began.acquire(timeout=WAIT_S)

    def answer(self):
        self.answers.release()


class LatentCache(SlowCache):
    """One whose every answer takes a moment."""

    def __init__(self):
        super().__init__()
        self.moment = threading.Event()
        self.draw = random.Random(3)

    def _late(self):
        self.moment.wait(self.draw.random() * 0.004)


def content(page_hash):
    return bytes.fromhex(page_hash) * (PAGE_NBYTES // 32)


def fill(hashes, pages):
    for position, page_hash in enumerate(hashes):
        pages.views(position)[0][:] = content(page_hash)


def verify(hashes, pages):
    assert [bytes(pages.views(at)[0]) for at in range(len(hashes))] == [content(name) for name in hashes]


def tokens(pages, first=0):
    return list(range(first, first + pages * PAGE_TOKENS))


def hashes_of(pages, first=0):
    return page_hashes(tokens(pages, first), PAGE_TOKENS)


def a_pool(num_pages):
    kv = Component("kv", "whole", "page_first", "bytes", PAGE_NBYTES)
    return HostPool.from_buffer(bytearray(PAGE_NBYTES * num_pages), kv)


@pytest.fixture
def slow():
    cache = SlowCache()
    cache.pages = {name: content(name) for name in hashes_of(6)}
    yield cache
    cache.answers.release(1000)


@pytest.fixture
def controller_of(slow):
    made = []

    def make(policy, num_pages=8, **options):
        pool, tree = a_pool(num_pages), RadixCache(PageAllocator(num_pages), PAGE_TOKENS)
        controller = HiCacheController(pool, tree, slow, prefetch_policy=policy, batch_pages=BATCH, **options)
        made.append(controller)
        return controller

    yield make
    slow.answers.release(1000)
    for controller in made:
        assert controller.shutdown(WAIT_S)


def asked(controller):
    prefetch = controller.prefetch(tokens(6), None, controller.tree.match_prefix(tokens(6)))
    assert len(prefetch.pages) == 6
    return prefetch


def kept(controller):
    """Give how many pages of the prefix are in memory, each with the right bytes."""
    pages = controller.tree.match_prefix(tokens(6)).pages
    verify(hashes_of(len(pages)), controller.pool.pages(pages))
    return len(pages)


def test_best_effort_starts_with_the_batches_that_came_and_the_late_one_writes_into_nobodys_page(
    slow, controller_of
):
    controller = controller_of(PrefetchPolicy.BEST_EFFORT)
    tree, pool = controller.tree, controller.pool
    prefetch = asked(controller)
    slow.next_call()
    assert controller.ready(prefetch)
    slow.answer()
    slow.next_call()  # the first batch is whole, the second is late
    assert controller.finish(prefetch) == 2
    mine = tree.allocator.take(tree.allocator.available)
    assert (len(mine), controller.pending, tree.locked_pages) == (2, 1, 0)
    assert set(mine).isdisjoint(prefetch.pages)
    for page in mine:
        pool.pages([page]).views(0)[0][:] = b"m" * PAGE_NBYTES
    slow.answer()
    assert prefetch.idle.wait(WAIT_S)
    assert not slow.began.acquire(blocking=False)  # no third batch was begun
    assert {bytes(pool.pages([page]).views(0)[0]) for page in mine} == {b"m" * PAGE_NBYTES}
    controller.poll()
    assert (kept(controller), controller.pending, tree.allocator.available) == (2, 0, 4)


def test_wait_complete_waits_for_the_last_late_batch(slow, controller_of):
    controller = controller_of(PrefetchPolicy.WAIT_COMPLETE)
    prefetch = asked(controller)
    waited = threading.Event()

    def wait():
        controller.wait(prefetch)
        waited.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    for done in (0, 2, 4):
        slow.next_call()
        assert (prefetch.done, controller.ready(prefetch), waited.is_set()) == (done, False, False)
        slow.answer()
    waiting.join(WAIT_S)
    assert (waited.is_set(), controller.ready(prefetch)) == (True, True)
    assert controller.finish(prefetch) == 6
    assert (kept(controller), controller.pending, controller.tree.locked_pages) == (6, 0, 0)


@pytest.mark.parametrize("batches", [0, 1, 2, 3])
def test_timeout_starts_with_the_batches_that_came_in_time(slow, controller_of, batches):
    now = [0.0]
    controller = controller_of(PrefetchPolicy.TIMEOUT, clock=lambda: now[0])
    prefetch = asked(controller)
    for _ in range(batches):
        slow.next_call()
        assert not controller.ready(prefetch)
        slow.answer()
    if batches < 3:
        slow.next_call()  # the one that comes too late
        assert not controller.ready(prefetch)
        now[0] = prefetch.deadline
    else:
        assert prefetch.idle.wait(WAIT_S)
    assert controller.ready(prefetch)
    controller.wait(prefetch)
    assert controller.finish(prefetch) == 2 * batches
    assert controller.pending == (batches < 3)
    slow.answer()
    assert prefetch.idle.wait(WAIT_S)
    controller.poll()
    assert (kept(controller), controller.pending) == (2 * batches, 0)
    assert controller.tree.allocator.available == 8 - 2 * batches


def test_a_late_write_through_keeps_its_pages_and_the_request_does_not_wait(slow, controller_of):
    controller = controller_of(PrefetchPolicy.WAIT_COMPLETE)
    tree = controller.tree
    wanted = tokens(4, first=100)
    pages = tree.allocator.take(4)
    fill(hashes_of(4, first=100), controller.pool.pages(pages))
    tree.insert(wanted, pages)
    controller.backup(wanted, None)
    for left in (2, 0):
        slow.next_call()
        assert (controller.pending, tree.locked_pages, tree.evict(8)) == (1, 4, 0)
        assert not controller.settle(0.01)
        slow.answer()
        assert left or controller.settle(WAIT_S)
    assert (controller.pending, tree.locked_pages, tree.evict(8)) == (0, 0, 4)
    assert [slow.pages[name] for name in hashes_of(4, first=100)] == [
        content(name) for name in hashes_of(4, first=100)
    ]


def test_a_late_write_back_is_waited_for_before_its_page_is_given_away(slow):
    engine = Engine(a_pool(4), PAGE_TOKENS, slow, fill, write_policy=WritePolicy.WRITE_BACK)
    try:
        engine.serve(tokens(4, first=100))
        served = []
        evicting = threading.Thread(target=lambda: served.append(engine.serve(tokens(4, first=900))))
        evicting.start()
        slow.next_call()
        # The eviction is under way: its pages are neither free nor anybody else's.
        assert (served, engine.tree.allocator.available) == ([], 0)
        slow.answer()
        evicting.join(WAIT_S)
        assert [(one.computed, one.dropped) for one in served] == [(4, 0)]
        assert [slow.pages[name] for name in hashes_of(4, first=100)] == [
            content(name) for name in hashes_of(4, first=100)
        ]
    finally:
        slow.answers.release(1000)
        assert engine.close(WAIT_S)


@pytest.mark.parametrize("write", list(WritePolicy))
@pytest.mark.parametrize("prefetch", list(PrefetchPolicy))
def test_many_requests_over_a_slow_store_are_right_and_leave_nothing(prefetch, write):
    """Few pages, so that prefetches, backups and evictions meet all the time; every byte is compared."""
    store, seen = LatentCache(), [0]

    def loaded(hashes, pages):
        verify(hashes, pages)
        seen[0] += len(hashes)

    options = {"loaded": loaded, "prefetch_policy": prefetch, "write_policy": write}
    engine = Engine(a_pool(12), PAGE_TOKENS, store, fill, **options)
    draw = random.Random(11)
    for _ in range(80):
        first = draw.choice([0, 1000, 2000])
        parts = draw.randrange(1, 8)
        engine.serve(tokens(parts, first), draw.choice([None, "adapter"]))
    assert engine.close(WAIT_S)
    assert all(value == content(name) for name, value in store.pages.items())
    tree = engine.tree
    assert (engine.controller.pending, tree.locked_pages) == (0, 0)
    assert tree.allocator.available + tree.total_pages == 12
    assert seen[0] > 0
