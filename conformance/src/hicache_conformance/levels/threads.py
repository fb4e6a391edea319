"""Level threads: any verbs, from any number of threads, at once (C8, C4)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from hicache_conformance.bench import Bench, aligned
from hicache_conformance.calls import in_threads
from hicache_core import Status

OK, MISS = Status.OK, Status.MISS

THREADS = [1, 2, 8]
NBYTES = 1 << 14


class ThreadsLevel:
    """Cases of level threads."""

    @pytest.mark.clause("C8", "C2")
    @pytest.mark.parametrize("threads", THREADS, ids=lambda n: f"{n}_threads")
    def test_c8_threads_with_keys_of_their_own(self, bench: Bench, threads: int) -> None:
        arenas = [bench.arena(16, NBYTES) for _ in range(threads)]
        storage = bench.open(*arenas)

        def work(which: int) -> None:
            arena, component = arenas[which], arenas[which].component
            for round_ in range(6):
                keys = bench.keys(16, component, f"own-{which}-{round_}")
                pages = {index: bench.page(key, NBYTES) for index, key in enumerate(keys)}
                for index, page in pages.items():
                    arena.fill(index, page)
                assert aligned(storage.batch_set(keys, arena.pages()), 16) == [OK] * 16
                for index in pages:
                    arena.fill(index, bytes(NBYTES))
                assert aligned(storage.batch_get(keys, arena.pages()), 16) == [OK] * 16
                arena.check(pages)
                assert aligned(storage.batch_contains(keys), 16) == [OK] * 16

        in_threads([partial(work, which) for which in range(threads)])

    @pytest.mark.clause("C8", "C2", "C4")
    @pytest.mark.parametrize("threads", THREADS, ids=lambda n: f"{n}_threads")
    def test_c8_readers_and_writers_of_one_key_set(self, bench: Bench, threads: int) -> None:
        storage, keys = bench.open(), bench.keys(48)

        def write(version: int) -> None:
            order = random.Random(f"{bench.seed}/{version}").sample(keys, len(keys))
            for start in range(0, len(order), 6):
                assert bench.set(storage, order[start : start + 6], NBYTES, version) == [OK] * 6

        def read(which: int) -> None:
            dice = random.Random(f"{bench.seed}/reader/{which}")
            for _ in range(12):
                seen = bench.versions(storage, dice.sample(keys, 8), NBYTES, known=threads)
                assert set(seen) <= {MISS, *range(threads)}, f"a get gave {seen}"

        in_threads([partial(write, i) for i in range(threads)] + [partial(read, i) for i in range(threads)])
        seen = bench.versions(storage, keys, NBYTES, known=threads)
        assert set(seen) <= set(range(threads))
        assert bench.versions(storage, keys, NBYTES, known=threads) == seen

    @pytest.mark.clause("C4", "C8")
    def test_c4_sets_of_one_key_at_the_same_moment_leave_one_whole_page(self, bench: Bench) -> None:
        storage = bench.open()
        for round_ in range(15):
            keys = bench.keys(3, label=f"same-{round_}")
            sets = [partial(bench.set, storage, keys, NBYTES, version) for version in range(4)]
            assert in_threads(sets) == [[OK] * 3] * 4
            seen = bench.versions(storage, keys, NBYTES)
            assert set(seen) <= {0, 1, 2, 3}
            assert bench.versions(storage, keys, NBYTES) == seen
        assert storage.usage().pages == 45

    @pytest.mark.clause("C4", "C8", "C2")
    def test_c4_a_page_once_seen_stays_the_same_while_others_set(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(16)
        bench.stored(storage, keys, NBYTES)

        def write(version: int) -> None:
            for _ in range(6):
                assert bench.set(storage, keys, NBYTES, version) == [OK] * 16

        def read() -> None:
            for _ in range(12):
                assert bench.versions(storage, keys, NBYTES) == [0] * 16

        jobs: list[Callable[[], None]] = [partial(write, 1), partial(write, 2), read, read]
        in_threads(jobs)

    @pytest.mark.clause("C8", "C6")
    @pytest.mark.needs("remove")
    def test_c8_removes_among_gets_and_sets_leave_whole_pages_or_misses(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(12)

        def write(version: int) -> None:
            for _ in range(15):
                assert bench.set(storage, keys, NBYTES, version) == [OK] * 12

        def remove() -> None:
            for _ in range(30):
                assert set(aligned(storage.batch_remove(keys), 12)) <= {OK, MISS}

        def read() -> None:
            for _ in range(20):
                assert set(bench.versions(storage, keys, NBYTES, known=2)) <= {0, 1, MISS}
                assert set(aligned(storage.batch_contains(keys), 12)) <= {OK, MISS}

        jobs: list[Callable[[], None]] = [partial(write, 0), partial(write, 1), remove, read, read]
        in_threads(jobs)
        left = bench.versions(storage, keys, NBYTES, known=2)
        wanted = [MISS if version is MISS else OK for version in left]
        assert aligned(storage.batch_remove(keys), 12) == wanted
        assert bench.versions(storage, keys, NBYTES) == [MISS] * 12

    @pytest.mark.clause("C8", "C9")
    @pytest.mark.needs("clear")
    def test_c8_clears_among_gets_and_sets_leave_whole_pages_or_misses(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(12)

        def write() -> None:
            for _ in range(15):
                assert bench.set(storage, keys, NBYTES) == [OK] * 12

        def clear() -> None:
            for _ in range(8):
                assert storage.clear() >= 0

        def read() -> None:
            for _ in range(20):
                assert set(bench.versions(storage, keys, NBYTES, known=1)) <= {0, MISS}

        in_threads([write, write, clear, read])
        storage.clear()
        assert bench.versions(storage, keys, NBYTES) == [MISS] * 12
        bench.stored(storage, keys, NBYTES, version=1)
        assert bench.versions(storage, keys, NBYTES) == [1] * 12

    @pytest.mark.clause("C8")
    def test_c8_counting_and_touching_while_others_work(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(40)

        def write() -> None:
            for start in range(0, 40, 4):
                bench.stored(storage, keys[start : start + 4])

        def count() -> None:
            before = 0
            for _ in range(20):
                run = storage.batch_exists(keys)
                pages = storage.usage().pages
                storage.touch(keys[:8])
                assert before <= run <= 40
                assert pages >= run
                before = run

        in_threads([write, count, count])
        assert (storage.batch_exists(keys), storage.usage().pages) == (40, 40)
