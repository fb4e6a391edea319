"""Several processes on one root at once, of one namespace and of different ones, with eviction and clears."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from hicache_core import Status
from hicache_file._evict import Taken

OK, MISS, NO_SPACE = Status.OK, Status.MISS, Status.NO_SPACE
BATCH = 16


def forked(work: Callable[[], None]) -> int:
    """Run work in a child; its exit status tells."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:  # noqa: BLE001 - shown on failure
            os.write(2, f"child {os.getpid()}: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    return pid


class Crew:
    """Writers, readers and a clearer of some namespaces, for some seconds."""

    def __init__(self, child: ModuleType, root: str, seconds: float, **options: Any) -> None:
        self.child, self.root, self.options = child, root, options
        self.deadline = time.monotonic() + seconds

    def store(self, tenant: str) -> Any:
        return self.child.Store(self.root, tenant=tenant, slots=BATCH, **self.options)

    def rounds(self) -> range:
        return range(1 << 30)

    def write(self, tenant: str, seed: int) -> None:
        """Set batches of a window that all writers of a namespace share; get each at once."""
        store, rng = self.store(tenant), random.Random(seed)
        stored = 0
        for _ in self.rounds():
            if time.monotonic() > self.deadline:
                break
            keys = self.child.keys_of("k", rng.randrange(400), BATCH)
            statuses = store.set(keys)
            assert set(statuses) <= {OK, NO_SPACE}, statuses
            assert set(store.get(keys)) <= {OK, MISS}
            stored += statuses.count(OK)
        assert stored > 0
        store.close()

    def read(self, tenant: str, seed: int) -> None:
        store, rng = self.store(tenant), random.Random(seed)
        while time.monotonic() < self.deadline:
            keys = self.child.keys_of("k", rng.randrange(400), BATCH)
            contains = store.contains(keys)
            assert set(contains) <= {OK, MISS}, contains
            seen = store.get(keys)
            assert set(seen) <= {OK, MISS}, seen
        store.close()

    def clear(self, tenant: str, pause_s: float) -> None:
        """Clear now and then; what was there before must be gone, what is set afterwards must be there."""
        store = self.store(tenant)
        number = 0
        while time.monotonic() < self.deadline:
            mine = self.child.keys_of("mine", number, 4)
            assert set(store.set(mine)) <= {OK, NO_SPACE}
            store.storage.clear()
            assert store.contains(mine) == [MISS] * 4
            number += 1
            until = time.monotonic() + pause_s
            while time.monotonic() < min(until, self.deadline):
                store.get(self.child.keys_of("k", number % 400, BATCH))
        store.close()


def run_crew(
    child: ModuleType, root: str, seconds: float, *, tenants: str, clear: bool, **options: Any
) -> None:
    opener = child.Store(root, **options)
    opener.close()
    options.pop("capacity", None)
    crew = Crew(child, root, seconds, **options)
    pids = []
    for number in range(2):
        tenant = tenants[number % len(tenants)]
        pids.append(forked(lambda t=tenant, n=number: crew.write(t, n)))  # type: ignore[misc]
        pids.append(forked(lambda t=tenant, n=number: crew.read(t, 10 + n)))  # type: ignore[misc]
    if clear:
        pids.append(forked(lambda: crew.clear(tenants[0], 0.5)))
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)


@pytest.mark.slow
@pytest.mark.clause("C2", "C8", "C9", "C15")
@pytest.mark.parametrize("tenants", ["a", "ab"], ids=["one namespace", "two namespaces"])
def test_writers_readers_evictions_and_clears_give_no_wrong_byte(
    child: ModuleType, make: Callable[..., Any], root: str, tenants: str
) -> None:
    run_crew(child, root, 7.5, tenants=tenants, clear=True, capacity=24 << 20)
    check_books(make, child, root, 24 << 20)


def run_takers(child: ModuleType, root: str, seconds: float) -> None:
    """Two writers evict and take over all the time; two readers, who leave no marks, open what is going.

    One of them compares no checksums, so that only the locks are between it and wrong bytes.
    """
    options = {"nbytes": 4096, "slots": BATCH}
    child.Store(root, capacity=8 << 20, **options).close()
    deadline = time.monotonic() + seconds

    def write(label: str) -> None:
        store, taken = child.Store(root, **options), 0
        real = Taken.of

        def counted(*given: Any) -> Taken | None:
            nonlocal taken
            found = real(*given)
            taken += found is not None
            return found

        Taken.of = counted  # type: ignore[method-assign, assignment]
        number = 0
        while time.monotonic() < deadline:
            assert set(store.set(child.keys_of(label, number, BATCH, 4096))) <= {OK, NO_SPACE}
            number += 1
        store.close()
        assert taken > number // 20

    def read(seed: int, checksum: bool) -> None:
        more = {"read_only": True, "max_open_segments": 8, "checksum": checksum}
        store, rng = child.Store(root, **more, **options), random.Random(seed)
        oldest, found = {"a": 0, "b": 0}, 0
        while time.monotonic() < deadline:  # keep to the edge that is evicted next
            label = rng.choice("ab")
            number = oldest[label] + rng.randrange(-2, 6)
            statuses = store.get(child.keys_of(label, max(0, number), BATCH, 4096))
            assert set(statuses) <= {OK, MISS}, statuses
            found += statuses.count(OK)
            oldest[label] += 1 if MISS in statuses else 0
        assert found > 0
        store.close()

    pids = [forked(lambda: write("a")), forked(lambda: write("b"))]
    pids += [forked(lambda: read(1, True)), forked(lambda: read(2, False))]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)


@pytest.mark.slow
@pytest.mark.clause("C1", "C15")
def test_readers_of_what_is_taken_over_see_no_wrong_byte(
    child: ModuleType, make: Callable[..., Any], root: str
) -> None:
    run_takers(child, root, 7.5)
    check_books(make, child, root, 8 << 20)


@pytest.mark.soak
@pytest.mark.clause("C1", "C15")
def test_readers_of_what_is_taken_over_for_a_minute(
    child: ModuleType, make: Callable[..., Any], root: str
) -> None:
    run_takers(child, root, 60)
    check_books(make, child, root, 8 << 20)


@pytest.mark.soak
@pytest.mark.clause("C2", "C8", "C9", "C15")
@pytest.mark.parametrize("tenants", ["a", "ab"], ids=["one namespace", "two namespaces"])
def test_writers_readers_evictions_and_clears_for_a_minute(
    child: ModuleType, make: Callable[..., Any], root: str, tenants: str
) -> None:
    run_crew(child, root, 60, tenants=tenants, clear=True, capacity=24 << 20)
    check_books(make, child, root, 24 << 20)


def check_books(make: Callable[..., Any], child: ModuleType, root: str, capacity: int) -> None:
    store = make()
    usage = store.storage.usage()
    files = sum(
        os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(root) for name in names
    )
    assert usage.store_bytes == files <= capacity
    assert store.set(child.keys_of("after", 0, BATCH)) == [OK] * BATCH


@pytest.mark.slow
@pytest.mark.clause("C3", "C8")
def test_c3_without_eviction_and_clear_nothing_is_lost(
    child: ModuleType, make: Callable[..., Any], start: Callable[..., Any], root: str
) -> None:
    """Two writers, and two readers that ask for each batch the moment that its set is OK."""
    writers = [
        start("write", root, label=f"w{n}", count=BATCH, batches=60, segment_size="1mib") for n in range(2)
    ]
    readers = [start("read", root, label=f"w{n}", count=BATCH) for n in range(2)]
    for _ in range(60):
        for writer, reader in zip(writers, readers, strict=True):
            number, statuses = writer.line().split()
            assert statuses == ",".join(["OK"] * BATCH)
            assert reader.ask(number) == statuses
    store = make()
    for number in range(60):
        for label in ("w0", "w1"):
            assert store.get(child.keys_of(label, number, BATCH)) == [OK] * BATCH
    assert store.storage.usage().pages == 2 * 60 * BATCH


@pytest.mark.clause("C4", "C8")
def test_c4_threads_that_set_the_same_keys_keep_one_copy(make: Callable[..., Any], child: ModuleType) -> None:
    import threading

    stores = [make(), make()]
    keys = child.keys_of("k", 0, 64)
    barrier = threading.Barrier(4)
    seen: list[list[Status]] = []

    def work(store: Any) -> None:
        barrier.wait()
        pages = store.pool.pages(range(64))
        seen.append(store.storage.batch_set(keys, pages))

    for store in stores:
        for i, key in enumerate(keys):
            store.buffer[i * store.nbytes : (i + 1) * store.nbytes] = child.page(key)
    threads = [threading.Thread(target=work, args=(store,)) for store in stores * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [[OK] * 64] * 4
    assert [store.get(keys) for store in stores] == [[OK] * 64] * 2
    assert stores[0].storage.usage().pages == 64
    fresh = make()
    assert fresh.storage.batch_remove(keys) == [OK] * 64
    assert [s.contains(keys) for s in (*stores, make())] == [[MISS] * 64] * 3
