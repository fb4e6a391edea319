"""The budget: what it bounds, who sets it, and who gets how much of it (R4, R5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hicache_core import Component, HostPool, Status
from hicache_core.errors import InvalidOptions

OK, MISS, NO_SPACE = Status.OK, Status.MISS, Status.NO_SPACE


def root_nbytes(root: str) -> int:
    return sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())


@pytest.mark.clause("C15")
def test_c15_a_root_of_64_mib_stays_within_its_budget(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    capacity = 64 << 20
    store = make(capacity="64mib", nbytes=1 << 18, slots=8)
    for number in range(60):
        keys = child.keys_of("k", number, 8, 1 << 18)
        assert store.set(keys) == [OK] * 8
        assert store.get(keys) == [OK] * 8
        assert root_nbytes(root) <= capacity
    usage = store.storage.usage()
    assert usage.store_bytes == root_nbytes(root)
    assert usage.capacity == capacity
    assert usage.bytes > 0.9 * capacity


@pytest.mark.clause("C15")
def test_c15_the_budget_counts_all_namespaces(make: Callable[..., Any], child: ModuleType, root: str) -> None:
    capacity = 8 << 20
    stores = [make(capacity=capacity, tenant=name, slots=16) for name in "abc"]
    for number in range(40):
        for store in stores:
            assert store.set(child.keys_of("k", number, 16)) == [OK] * 16
        assert root_nbytes(root) <= capacity + capacity // 128
    assert {store.storage.usage().store_bytes for store in stores} == {root_nbytes(root)}
    left = [store.contains(child.keys_of("k", 39, 16)).count(OK) for store in stores]
    assert left == [16, 16, 16]


@pytest.mark.clause("C15")
def test_c15_an_idle_namespace_is_evicted_by_a_busy_one(make: Callable[..., Any], child: ModuleType) -> None:
    idle, busy = (make(capacity=8 << 20, tenant=name, slots=16) for name in "ab")
    idle.set(child.keys_of("k", 0, 16))
    idle.close()
    for number in range(60):
        assert busy.set(child.keys_of("k", number, 16)) == [OK] * 16
    assert make(tenant="a").contains(child.keys_of("k", 0, 16)) == [MISS] * 16


def test_the_first_opener_sets_the_budget_and_one_without_keeps_it(make: Callable[..., Any]) -> None:
    first, second = make(capacity="64mib"), make()
    assert second.storage.usage().capacity == 64 << 20
    assert second.storage.capabilities.eviction == "approx"
    first.close()
    second.close()
    assert make().storage.usage().capacity == 64 << 20


def test_a_second_opener_with_another_budget_replaces_it_and_it_is_logged(
    make: Callable[..., Any], child: ModuleType, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = make(capacity="64mib")
    for number in range(100):
        first.set(child.keys_of("k", number, 16))
    assert root_nbytes(root) > 24 << 20
    with caplog.at_level("INFO", logger="hicache_file"):
        second = make(capacity="16mib")
    assert [record.getMessage() for record in caplog.records] == [
        f"the budget of '{root}' is now 16777216 bytes; it was 67108864"
    ]
    assert first.storage.usage().capacity == 16 << 20
    assert second.set(child.keys_of("new", 0, 16)) == [OK] * 16
    assert first.set(child.keys_of("new", 1, 64)) == [OK] * 64
    assert root_nbytes(root) <= 16 << 20
    assert second.get(child.keys_of("new", 0, 16)) == [OK] * 16


def test_a_root_without_a_budget_does_not_evict(make: Callable[..., Any]) -> None:
    store = make()
    assert (store.storage.usage().capacity, store.storage.capabilities.eviction) == (None, "none")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (-5, "-5 is negative; a size is 0 or more bytes"),
        ("4 gigs", """4 gigs' is not a size (try "4GiB")"""),
        (
            "63kib",
            "capacity=64512 bytes holds no page; the least is 65536 bytes, and 16 times the largest page",
        ),
        (0, "capacity=0 bytes holds no page; the least is 65536 bytes"),
    ],
)
def test_a_budget_that_is_none_is_refused_with_the_least_and_nothing_is_written(
    make: Callable[..., Any], root: str, given: Any, complaint: str
) -> None:
    with pytest.raises(InvalidOptions) as refused:
        make(capacity=given)
    assert complaint in str(refused.value)
    assert not Path(root).exists()


def test_a_budget_below_sixteen_pages_is_refused_naming_the_least(
    make: Callable[..., Any], root: str
) -> None:
    with pytest.raises(InvalidOptions) as refused:
        make(capacity="255kib", nbytes=16384)
    assert "capacity=261120 bytes is too small for pages of 16384 bytes of component 'kv'" in str(
        refused.value
    )
    assert "the least is 262144 bytes (16 pages)" in str(refused.value)
    assert not Path(root).exists()
    assert make(capacity="256kib", nbytes=16384).storage.is_open


def test_a_pool_added_later_is_held_to_the_budget(make: Callable[..., Any]) -> None:
    store = make(capacity="256kib")
    big = Component("big", shard="whole", byte_order="page_first", format="bf16", page_nbytes=16385)
    with pytest.raises(InvalidOptions, match="the least is 262160 bytes"):
        store.storage.add_pool(HostPool.from_buffer(bytearray(16385), big))


@pytest.mark.clause("C15")
def test_c15_sixteen_pages_are_a_budget(make: Callable[..., Any], child: ModuleType, root: str) -> None:
    store = make(capacity="256kib")
    for number in range(30):
        keys = child.keys_of("k", number, 2)
        assert store.set(keys) == [OK] * 2
        assert store.get(keys) == [OK] * 2
        assert root_nbytes(root) <= (256 << 10) + 16384
    assert store.storage.usage().pages >= 8


def test_a_page_larger_than_a_segment_has_one_of_its_own(make: Callable[..., Any], child: ModuleType) -> None:
    nbytes = 3 << 20
    for options in ({"segment_size": "64kib"}, {"capacity": "64mib", "root": None}):
        if options.get("root", "") is None:
            options["root"] = make().storage.options.root + "-bounded"
        store = make(nbytes=nbytes, slots=4, **options)
        keys = child.keys_of("k", 0, 4, nbytes)
        assert store.set(keys) == [OK] * 4
        assert store.get(keys) == [OK] * 4


@pytest.mark.clause("C15")
def test_c15_a_batch_does_not_evict_its_own_pages(make: Callable[..., Any], child: ModuleType) -> None:
    store = make(capacity="512kib", slots=64)
    keys = child.keys_of("k", 0, 64)
    statuses = store.set(keys)
    kept = statuses.count(OK)
    assert 12 <= kept < 32
    assert sorted(set(statuses)) == [OK, NO_SPACE]
    stored = [key for key, status in zip(keys, statuses, strict=True) if status is OK]
    assert store.get(stored) == [OK] * kept
    assert store.set(child.keys_of("later", 0, 4)) == [OK] * 4


@pytest.mark.slow
@pytest.mark.clause("C15")
def test_c15_thirty_two_writers_under_a_small_budget(
    make: Callable[..., Any], child: ModuleType, start: Callable[..., Any], root: str
) -> None:
    capacity = 16 << 20
    watcher = make(capacity=capacity)
    writers = [start("write", root, label=f"w{n}", count=4, batches=30) for n in range(32)]
    most = 0
    for number in range(30):
        for writer in writers:
            seen = writer.line().split()
            assert seen[0] == str(number)
            assert set(seen[1].split(",")) <= {"OK", "NO_SPACE"}
        most = max(most, watcher.storage.usage().store_bytes)
    assert most <= capacity + capacity // 128
    for writer in writers:
        assert writer.process.wait(30) == 0
    assert watcher.storage.usage().store_bytes == root_nbytes(root)
    assert root_nbytes(root) <= capacity
    assert watcher.set(child.keys_of("after", 0, 16)) == [OK] * 16


@pytest.mark.clause("C15")
def test_c15_open_segments_of_many_writers_take_a_quarter_at_most(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    capacity = 1 << 20
    stores = [make(capacity=capacity, slots=2) for _ in range(24)]
    statuses = [store.set(child.keys_of(f"s{n}", 0, 2)) for n, store in enumerate(stores)]
    with stores[0].storage._opened.root.held(1.0) as ledger:
        assert ledger.open_nbytes <= capacity // 4
    flat = [status for pair in statuses for status in pair]
    assert set(flat) <= {OK, NO_SPACE}
    assert flat[:2] == [OK, OK]
    for store in stores[1:]:
        store.close()
    assert stores[0].set(child.keys_of("after", 0, 2)) == [OK] * 2
