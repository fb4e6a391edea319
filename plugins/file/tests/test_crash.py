"""A writer that dies: nothing promised is lost, nothing damaged is served, no space stays taken."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hicache_core import Status

OK, MISS = Status.OK, Status.MISS
COUNT = 16
SEGMENT_NBYTES = 1 << 20


def root_nbytes(root: str) -> int:
    return sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())


def kill_a_writer(start: Callable[..., Any], root: str, rng: random.Random, **given: Any) -> int:
    """Kill a writer somewhere in its batches; give how many of them it had promised."""
    process = start("write", root, count=COUNT, **given)
    for _ in range(rng.randrange(1, 60)):
        promised = process.line()
    process.kill()
    rest = process.rest()
    assert set(promised.split()[1].split(",")) == {"OK"}
    return int((rest[-1] if rest and rest[-1].endswith("OK") else promised).split()[0])


def rounds_of_killing(
    count: int, start: Callable[..., Any], child: ModuleType, root: str, **options: Any
) -> None:
    rng = random.Random(count)
    promised: dict[str, int] = {}
    for number in range(count):
        label = f"round-{number}"
        promised[label] = kill_a_writer(
            start, root, rng, label=label, segment_size=SEGMENT_NBYTES, lanes=rng.choice((1, 2)), **options
        )
        store = child.Store(root, segment_size=SEGMENT_NBYTES, **options)
        try:
            for batch in range(promised[label] + 1):
                assert store.get(child.keys_of(label, batch, COUNT)) == [OK] * COUNT
            for batch in range(promised[label] + 1, promised[label] + 3):
                assert set(store.get(child.keys_of(label, batch, COUNT))) <= {OK, MISS}
            live = store.storage.usage().bytes
        finally:
            store.close()
        assert root_nbytes(root) <= live * 1.02 + 2 * SEGMENT_NBYTES + (64 << 10)
    assert store.storage.is_open is False


@pytest.mark.slow
@pytest.mark.clause("C14")
def test_c14_a_killed_writer_loses_no_promised_page_and_leaves_no_tail(
    start: Callable[..., Any], child: ModuleType, root: str
) -> None:
    rounds_of_killing(20, start, child, root)


@pytest.mark.soak
@pytest.mark.clause("C14")
def test_c14_a_writer_killed_two_hundred_times(
    start: Callable[..., Any], child: ModuleType, root: str
) -> None:
    rounds_of_killing(200, start, child, root)


@pytest.mark.clause("C14")
def test_c14_with_fsync_a_killed_writer_loses_nothing_either(
    start: Callable[..., Any], child: ModuleType, root: str
) -> None:
    rounds_of_killing(3, start, child, root, fsync=1)


def test_a_dead_writers_tail_is_cut_by_the_next_open(
    start: Callable[..., Any], make: Callable[..., Any], root: str
) -> None:
    process = start("write", root, count=1, batches=0)
    process.line()
    process.kill()
    process.rest()
    process.end()
    assert root_nbytes(root) > 64 << 20
    store = make()
    assert root_nbytes(root) < 2 << 20
    assert store.storage.usage().store_bytes == root_nbytes(root)


def test_a_living_writers_segment_is_not_cut(
    start: Callable[..., Any], make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    process = start("write", root, count=1, batches=0)
    process.line()
    store = make()
    assert root_nbytes(root) > 64 << 20
    seen = int(process.line().split()[0])
    assert store.get(child.keys_of("w", seen, 1)) == [OK]


def test_a_segment_without_its_journal_is_removed(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    store = make()
    keys = child.keys_of("k", 0, 4)
    assert store.set(keys) == [OK] * 4
    store.close()
    folder = Path(root) / store.namespace.id
    orphan = folder / ("ab" * 16 + ".seg")
    orphan.write_bytes(b"x" * 100)
    half = folder / ("cd" * 16 + ".new")
    half.write_bytes(b"x" * 100)
    again = make()
    assert not orphan.exists()
    assert not half.exists()
    assert again.get(keys) == [OK] * 4
    assert again.storage.usage().store_bytes == root_nbytes(root)


def die_with_dirty_books(books: Any) -> None:
    with books.held(1.0) as ledger:
        ledger.used = 5
        ledger.write(dirty=True)
        raise KeyError("the holder dies here")


def test_books_left_dirty_are_counted_again(make: Callable[..., Any], child: ModuleType, root: str) -> None:
    store, other = make(lanes=1), make(lanes=1)
    store.set(child.keys_of("k", 0, 4))
    with pytest.raises(KeyError):
        die_with_dirty_books(store.storage._opened.root)
    assert other.storage.usage().store_bytes == root_nbytes(root)
