"""Level evict: a store with a capacity stays within it and gives away nothing in use (C15, C2)."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from hicache_conformance.bench import Bench, aligned
from hicache_conformance.calls import Call, in_threads
from hicache_core import HiCacheError, HiCacheStorage, Status

OK, MISS, NO_SPACE = Status.OK, Status.MISS, Status.NO_SPACE

NBYTES = 1 << 14
CAPACITY = 4 << 20
#: Turned over in a few sets.
SMALL_CAPACITY = 1 << 19
BATCH = 8

#: Of the pages that were used, and of those that were not, for an eviction that only approximates.
APPROX_KEPT = 0.8
APPROX_GONE = 0.2


class EvictLevel:
    """Cases of level evict."""

    @pytest.mark.clause("C15")
    @pytest.mark.faults("bounded")
    def test_c15_the_store_stays_within_its_capacity(self, bench: Bench) -> None:
        bench.bounded(CAPACITY)
        storage = bench.open()
        capacity = _capacity(storage)
        keys = bench.keys(3 * capacity // NBYTES)
        for batch in _batches(keys):
            assert set(bench.set(storage, batch, NBYTES)) <= {OK, NO_SPACE}
            usage = storage.usage()
            assert usage.store_bytes <= capacity + BATCH * NBYTES
            assert usage.bytes <= usage.store_bytes
            assert usage.capacity == capacity

    @pytest.mark.clause("C15", "C3")
    @pytest.mark.faults("bounded")
    @pytest.mark.needs("eviction")
    def test_c15_a_full_store_takes_new_pages_and_each_can_be_got(self, bench: Bench) -> None:
        bench.bounded(CAPACITY)
        storage = bench.open()
        for batch in _batches(bench.keys(2 * _capacity(storage) // NBYTES)):
            assert bench.set(storage, batch, NBYTES) == [OK] * len(batch)
            assert bench.versions(storage, batch, NBYTES) == [0] * len(batch)

    @pytest.mark.clause("C15", "C6", "C2")
    @pytest.mark.faults("bounded")
    def test_c15_what_was_evicted_is_a_miss_and_the_rest_is_whole(self, bench: Bench) -> None:
        bench.bounded(CAPACITY)
        storage = bench.open()
        keys = bench.keys(2 * _capacity(storage) // NBYTES)
        for batch in _batches(keys):
            bench.set(storage, batch, NBYTES)
        there = bench.contains(storage, keys)
        seen = [version for batch in _batches(keys) for version in bench.versions(storage, batch, NBYTES)]
        assert set(there) == {OK, MISS}
        assert seen == [0 if status is OK else MISS for status in there]
        assert storage.usage().pages == seen.count(0)

    @pytest.mark.clause("C15", "C4")
    @pytest.mark.faults("bounded")
    @pytest.mark.needs("eviction")
    def test_c15_an_evicted_key_takes_a_new_page(self, bench: Bench) -> None:
        bench.bounded(CAPACITY)
        storage = bench.open()
        keys = bench.keys(2 * _capacity(storage) // NBYTES)
        for batch in _batches(keys):
            bench.stored(storage, batch, NBYTES)
        gone = [key for key, s in zip(keys, bench.contains(storage, keys), strict=True) if s is MISS][:BATCH]
        bench.stored(storage, gone, NBYTES, version=1)
        assert bench.versions(storage, gone, NBYTES) == [1] * len(gone)

    @pytest.mark.clause("C15")
    @pytest.mark.faults("bounded")
    @pytest.mark.needs("eviction")
    @pytest.mark.parametrize("use", ["get", "set", "touch"])
    def test_c15_what_was_used_outlives_what_was_not(self, bench: Bench, use: str) -> None:
        used, looked_at, idle = _survivors(bench, use)
        kept, gone = (1.0, 0.0) if bench.capabilities.eviction == "lru" else (APPROX_KEPT, APPROX_GONE)
        assert used >= kept, f"{used:.0%} of the pages used by {use} are left"
        assert idle <= gone, f"{idle:.0%} of the idle pages are left"
        assert looked_at <= gone, f"{looked_at:.0%} of the pages are left that only contains asked for"

    @pytest.mark.clause("C2", "C15")
    @pytest.mark.faults("bounded")
    @pytest.mark.needs("eviction")
    def test_c2_a_page_that_is_evicted_while_it_is_read_is_whole_or_a_miss(self, bench: Bench) -> None:
        bench.bounded(SMALL_CAPACITY)
        storage = bench.open()
        window = bench.keys(_capacity(storage) // NBYTES)
        stop = threading.Event()
        recent: list[str] = []

        def write() -> int:
            rounds = 0
            while not stop.is_set():
                batch = [window[(rounds * BATCH + i) % len(window)] for i in range(BATCH)]
                fresh = bench.keys(BATCH, label=f"flood-{rounds}")
                bench.set(storage, [*batch, *fresh], NBYTES)
                recent[:] = [*recent, *batch, *fresh][-256:]
                rounds += 1
            return rounds

        def read() -> set[Status | int]:
            seen: set[Status | int] = set()
            while not stop.is_set():
                asked = recent[:16] + recent[-16:]
                seen.update(bench.versions(storage, asked, NBYTES, known=1))
            return seen

        calls: list[Call[Any]] = [Call(write), Call(write), Call(read), Call(read)]
        stop.wait(2.0)
        stop.set()
        results = [call.result() for call in calls]
        assert all(result <= {0, MISS} for result in results[2:]), f"gets gave {results[2:]}"

    @pytest.mark.clause("C15")
    @pytest.mark.faults("bounded")
    def test_c15_a_full_store_that_does_not_evict_says_so_and_keeps_what_it_has(self, bench: Bench) -> None:
        if bench.capabilities.eviction != "none":
            pytest.skip("unsupported: a store that does not evict")
        bench.bounded(CAPACITY)
        storage = bench.open()
        keys = bench.keys(2 * _capacity(storage) // NBYTES)
        statuses = [status for batch in _batches(keys) for status in bench.set(storage, batch, NBYTES)]
        assert set(statuses) == {OK, NO_SPACE}
        seen = [version for batch in _batches(keys) for version in bench.versions(storage, batch, NBYTES)]
        assert seen == [0 if status is OK else MISS for status in statuses]
        if bench.capabilities.remove:
            kept = [key for key, status in zip(keys, statuses, strict=True) if status is OK]
            assert aligned(storage.batch_remove(kept[:BATCH]), BATCH) == [OK] * BATCH
            refused = [key for key, status in zip(keys, statuses, strict=True) if status is NO_SPACE]
            bench.stored(storage, refused[: BATCH // 2], NBYTES)
            assert bench.versions(storage, refused[: BATCH // 2], NBYTES) == [0] * (BATCH // 2)

    @pytest.mark.clause("C15", "C4")
    @pytest.mark.faults("bounded")
    def test_c15_a_page_that_can_never_fit_is_refused_and_later_sets_work(self, bench: Bench) -> None:
        bench.bounded(CAPACITY)
        storage, keys = bench.open(), bench.keys(3)
        bench.stored(storage, keys[:1], NBYTES)
        huge = _capacity(storage) + NBYTES
        if huge > (bench.capabilities.max_page_nbytes or huge):
            pytest.skip("unsupported: a page that could be larger than the store")
        try:
            assert bench.set(storage, keys[1:2], huge) == [NO_SPACE]
        except HiCacheError:
            pass  # refused when the pool was added, which is earlier still
        assert aligned(storage.batch_contains(keys[1:2]), 1) == [MISS]
        bench.stored(storage, keys[2:], NBYTES)
        assert bench.versions(storage, keys[2:], NBYTES) == [0]

    @pytest.mark.clause("C15")
    @pytest.mark.faults("bounded")
    @pytest.mark.needs("shared")
    def test_c15_two_writers_stay_within_one_capacity(self, bench: Bench) -> None:
        bench.bounded(CAPACITY)
        writers = [bench.open(), bench.open()]
        capacity = _capacity(writers[0])
        batches = [_batches(bench.keys(capacity // NBYTES, label=f"writer-{i}")) for i in range(2)]

        def write(which: int) -> set[Status]:
            return {status for batch in batches[which] for status in bench.set(writers[which], batch, NBYTES)}

        for statuses in in_threads([partial(write, 0), partial(write, 1)]):
            assert statuses <= {OK, NO_SPACE}
        assert {writer.usage().capacity for writer in writers} == {capacity}
        assert writers[0].usage().store_bytes <= capacity + 2 * BATCH * NBYTES


def _survivors(bench: Bench, use: str) -> tuple[float, float, float]:
    """Keep using a few pages while new ones fill the store twice; give the portions left of each kind."""
    if bench.capabilities.eviction not in ("lru", "approx"):
        pytest.skip("unsupported: an order of eviction")
    bench.bounded(CAPACITY)
    storage = bench.open()
    room = _capacity(storage) // NBYTES
    first = bench.keys(room // 2, label="first")
    for batch in _batches(first):
        bench.stored(storage, batch, NBYTES)
    used, looked_at = first[::8], first[1::8]
    idle = [key for key in first if key not in {*used, *looked_at}]
    for batch in _batches(bench.keys(2 * room, label="filler")):
        bench.stored(storage, batch, NBYTES)
        if use == "get":
            bench.get(storage, used, NBYTES)
        elif use == "set":
            there = bench.contains(storage, used)
            bench.set(storage, [k for k, s in zip(used, there, strict=True) if s is OK], NBYTES, version=1)
        else:
            storage.touch(used)
        storage.batch_contains(looked_at)
    left = [bench.contains(storage, keys).count(OK) / len(keys) for keys in (used, looked_at, idle)]
    if use == "set":
        assert set(bench.versions(storage, used, NBYTES)) <= {0, MISS}
    return left[0], left[1], left[2]


def _capacity(storage: HiCacheStorage) -> int:
    capacity = storage.usage().capacity
    assert capacity is not None, "C15: a bounded store has a capacity"
    assert capacity <= 8 * CAPACITY, f"the harness was asked for {CAPACITY} bytes and made {capacity}"
    return capacity


def _batches(keys: list[str]) -> list[list[str]]:
    return [keys[start : start + BATCH] for start in range(0, len(keys), BATCH)]
