"""What one instance knows while its catalog is replaced, others write, and descriptors run out."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from hicache_core import Status
from hicache_file import _writer
from hicache_file._catalog import Catalog
from hicache_file._files import Folder
from hicache_file._format import LARGEST_JOURNAL_NBYTES, journal_nbytes, journal_room
from hicache_file._index import RECORD_BITS
from hicache_file._journal import digests_of

pytestmark = pytest.mark.usefixtures("no_leaks")

OK, MISS, UNAVAILABLE = Status.OK, Status.MISS, Status.UNAVAILABLE
#: A budget with the smallest ring of events, of 32.
SMALL: dict[str, Any] = {"capacity": "8mib", "lanes": 1, "nbytes": 4096}


def catalog_of(store: Any) -> Catalog:
    """Give the catalog that a store has now."""
    return store.storage._opened.follower.catalog


def overflow(store: Any, keys: list[str]) -> None:
    """Publish more events than the ring holds: these keys, set before, are removed."""
    assert len(keys) > 32
    assert store.storage.batch_remove(keys) == [OK] * len(keys)


def segment_of(store: Any, key: str) -> Any:
    """Give the segment in which a store's catalog knows a key."""
    (place,) = catalog_of(store).find(digests_of([key.encode()]))
    return catalog_of(store).segment(place >> RECORD_BITS)


@pytest.mark.clause("C3")
def test_c3_growth_that_a_replaced_catalog_takes_in_reaches_the_new_one(
    make: Callable[..., Any], child: ModuleType
) -> None:
    reader, writer = make(**SMALL), make(**SMALL)
    spent, late = child.keys_of("spent", 0, 40, 4096), child.keys_of("late", 0, 3, 4096)
    assert writer.set(spent) == [OK] * 40
    assert reader.contains(spent) == [OK] * 40
    before = catalog_of(reader)
    overflow(writer, spent)
    assert reader.contains(spent) == [MISS] * 40
    assert catalog_of(reader) is not before
    assert writer.set(late) == [OK] * 3
    assert before.grow() == 3
    assert reader.get(late) == [OK] * 3


@pytest.mark.clause("C3")
def test_c3_a_segment_that_a_replaced_catalog_forgot_is_forgotten_by_the_new_one_too(
    make: Callable[..., Any], child: ModuleType
) -> None:
    reader, writer = make(**SMALL), make(**SMALL)
    spent, key = child.keys_of("spent", 0, 40, 4096), child.keys_of("key", 0, 1, 4096)
    assert writer.set(key) == [OK]
    writer.close()
    assert reader.contains(key) == [OK]
    other = make(**SMALL)
    assert other.set(spent) == [OK] * 40
    assert reader.contains(spent) == [OK] * 40
    before, segment = catalog_of(reader), segment_of(reader, key[0])
    overflow(other, spent)
    assert reader.contains(key) == [OK]
    assert catalog_of(reader) is not before
    opened = reader.storage._opened
    with opened.root.held(5) as ledger:
        ledger.remove(opened.space.folder, segment.name)
    before.forget(segment)
    assert reader.get(key) == [MISS]
    assert reader.contains(key) == [MISS]
    assert reader.set(key) == [OK]
    assert reader.get(key) == [OK]


@pytest.mark.clause("C3")
@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
def test_c3_a_look_sees_the_growth_that_another_thread_has_taken_in(
    make: Callable[..., Any], child: ModuleType, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    reader, writer = make(**SMALL), make(**SMALL)
    first, late = child.keys_of("first", 0, 1, 4096), child.keys_of("late", 0, 3, 4096)
    assert writer.set(first) == [OK]
    assert reader.contains(first) == [OK]
    assert writer.set(late) == [OK] * 3
    catalog = catalog_of(reader)
    if sealed:
        writer.close()
    find, taken = catalog.find, []

    def overtaken(digests: list[bytes]) -> list[int]:
        found = find(digests)
        if not taken:  # here another thread looks
            taken.append(catalog.grow())
        return found

    monkeypatch.setattr(catalog, "find", overtaken)
    assert reader.contains(late) == [OK] * 3
    assert taken == [3]


def between(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Act once between a set's journal records and their entry in the writer's own index."""
    real, left = _writer.write_exactly, [act]

    def write(fd: int, payload: Any, offset: int) -> None:
        real(fd, payload, offset)
        if left:
            left.pop()()

    monkeypatch.setattr(_writer, "write_exactly", write)


@pytest.mark.clause("C3")
@pytest.mark.parametrize("fresh", [False, True], ids=["events", "loaded"])
def test_c3_a_remove_before_the_writer_has_entered_its_page_is_not_undone(
    make: Callable[..., Any], child: ModuleType, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    writer, other = make(**SMALL), make(**SMALL)
    keys, spent = child.keys_of("k", 0, 3, 4096), child.keys_of("spent", 0, 40, 4096)
    assert other.set(spent) == [OK] * 40
    assert writer.contains(spent) == [OK] * 40
    removed: list[Status] = []

    def remove() -> None:
        removed.extend(other.storage.batch_remove(keys[1:2]))
        if fresh:  # the writer has fallen behind and lists everything
            overflow(other, spent)
        writer.storage._opened.current()

    between(monkeypatch, remove)
    assert writer.set(keys) == [OK] * 3
    assert removed == [OK]
    seen = [OK, MISS, OK]
    assert writer.contains(keys) == other.contains(keys) == seen
    assert writer.get(keys) == other.get(keys) == seen
    assert writer.set(keys) == [OK] * 3
    assert writer.get(keys) == other.get(keys) == [OK] * 3


@pytest.mark.clause("C3")
def test_c3_a_remove_by_the_writer_itself_before_it_has_entered_its_page_is_not_undone(
    make: Callable[..., Any], child: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, other = make(**SMALL), make(**SMALL)
    keys, spent = child.keys_of("k", 0, 3, 4096), child.keys_of("spent", 0, 40, 4096)
    assert other.set(spent) == [OK] * 40
    removed: list[Status] = []

    def remove() -> None:
        overflow(other, spent)
        writer.storage._opened.current()  # finds the records in the journal
        removed.extend(writer.storage.batch_remove(keys[1:2]))
        writer.storage._opened.current()

    between(monkeypatch, remove)
    assert writer.set(keys) == [OK] * 3
    assert removed == [OK]
    assert writer.get(keys) == other.get(keys) == [OK, MISS, OK]


@contextmanager
def no_descriptors(store: Any, ending: str = ".idx") -> Iterator[None]:
    """Let a store open no segment, as in a process that is out of descriptors."""
    folder = store.storage._opened.space.folder
    assert store.storage._opened.space.handles.make_room() >= 0
    real = Folder.open

    def refuse(self: Folder, name: str, *given: Any) -> int:
        if self is folder and name.endswith(ending):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(self, name, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "open", refuse)
        yield


@pytest.mark.clause("C3")
def test_c3_a_segment_that_could_not_be_opened_when_it_was_announced_is_not_lost(
    make: Callable[..., Any], child: ModuleType
) -> None:
    reader, writer = make(**SMALL), make(**SMALL)
    keys = child.keys_of("k", 0, 2, 4096)
    assert writer.set(keys) == [OK] * 2
    with no_descriptors(reader):
        assert reader.contains(keys) == [UNAVAILABLE] * 2
        assert reader.get(keys) == [UNAVAILABLE] * 2
    assert reader.contains(keys) == [OK] * 2
    assert reader.get(keys) == [OK] * 2


@pytest.mark.clause("C3")
def test_c3_a_segment_that_could_not_be_opened_for_a_burial_is_not_forgotten(
    make: Callable[..., Any], child: ModuleType
) -> None:
    reader, writer = make(**SMALL), make(**SMALL)
    keys = child.keys_of("k", 0, 3, 4096)
    assert writer.set(keys) == [OK] * 3
    assert reader.get(keys) == [OK] * 3
    assert writer.storage.batch_remove(keys[1:2]) == [OK]
    with no_descriptors(reader):
        assert reader.contains(keys) == [UNAVAILABLE] * 3
    assert reader.contains(keys) == [OK, MISS, OK]
    assert reader.get(keys) == [OK, MISS, OK]


@pytest.mark.clause("C3")
def test_c3_a_namespace_that_could_not_be_listed_whole_is_listed_again(
    make: Callable[..., Any], child: ModuleType
) -> None:
    reader, writer = make(**SMALL), make(**SMALL)
    spent, keys = child.keys_of("spent", 0, 40, 4096), child.keys_of("k", 0, 3, 4096)
    assert writer.set(spent) == [OK] * 40
    assert writer.set(keys) == [OK] * 3
    assert reader.get(keys) == [OK] * 3
    overflow(writer, spent)
    with no_descriptors(reader):
        assert reader.contains(keys) == [UNAVAILABLE] * 3
    assert reader.get(keys) == [OK] * 3


@pytest.mark.clause("C3")
def test_c3_a_journal_that_nobody_may_open_costs_its_own_pages_only(
    make: Callable[..., Any], child: ModuleType
) -> None:
    reader, writer = make(**SMALL), make(**SMALL)
    keys = child.keys_of("k", 0, 2, 4096)
    assert writer.set(keys[:1]) == [OK]
    assert reader.get(keys[:1]) == [OK]
    folder = reader.storage._opened.space.folder
    os.symlink("nowhere", f"{'0' * 32}.idx", dir_fd=folder.fd)
    late = make(**SMALL)
    assert late.get(keys) == [OK, MISS]
    assert reader.get(keys) == [OK, MISS]


@pytest.mark.clause("C3", "C10")
def test_c10_growth_that_cannot_be_read_is_no_miss(make: Callable[..., Any], child: ModuleType) -> None:
    reader, writer = make(**SMALL), make(**SMALL)
    keys = child.keys_of("k", 0, 2, 4096)
    assert writer.set(keys[:1]) == [OK]
    assert reader.get(keys[:1]) == [OK]
    assert writer.set(keys[1:]) == [OK]
    with no_descriptors(reader, ".seg"):
        assert reader.contains(keys[:1]) == [OK]
        assert reader.contains(keys[1:]) == reader.get(keys[1:]) == [UNAVAILABLE]
        assert reader.storage.batch_remove(keys[1:]) == [UNAVAILABLE]
    assert reader.contains(keys) == reader.get(keys) == [OK] * 2
    assert reader.storage.batch_remove(keys[1:]) == [OK]


def test_a_journal_is_never_longer_than_what_is_read_of_one() -> None:
    for nbytes in (1 << 20, 64 << 20, 8 << 30, 1 << 40):
        room = journal_room(nbytes)
        assert room % 64 == 0
        assert journal_nbytes(room) <= LARGEST_JOURNAL_NBYTES


@pytest.mark.clause("C10", "C15")
def test_c10_a_file_made_longer_by_hand_has_the_books_counted_again(
    make: Callable[..., Any], child: ModuleType
) -> None:
    store = make(capacity="2mib", lanes=1)
    for batch in range(4):
        assert store.set(child.keys_of("old", batch, 16)) == [OK] * 16
    folder = store.storage._opened.space.folder
    for name in folder.names():
        if name.endswith(".seg"):
            os.truncate(f"/proc/self/fd/{folder.fd}/{name}", 1 << 33)
    for batch in range(32):
        assert store.set(child.keys_of("new", batch, 16)) == [OK] * 16
    usage = store.storage.usage()
    assert 0 < usage.store_bytes <= 2 << 20
    assert usage.store_bytes >= usage.bytes > 1 << 20
