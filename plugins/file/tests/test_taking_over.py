"""Evicted segments whose files become the next ones, and segments made ahead of need (R5, R7)."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hicache_core import Status
from hicache_file import _segment
from hicache_file._files import lock_alone
from hicache_file._index import RECORD_BITS
from hicache_file._journal import digests_of
from hicache_file._spares import Spares

OK, MISS = Status.OK, Status.MISS
#: 128 segments of one batch of 16 pages of 4 KiB each.
CAPACITY, COUNT, PAGE = 8 << 20, 16, 4096


def segments(root: str) -> dict[int, Path]:
    """Give the .seg files by inode."""
    return {path.stat().st_ino: path for path in Path(root).rglob("*.seg")}


def root_nbytes(root: str) -> int:
    return sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())


def fill(store: Any, child: ModuleType, first: int, batches: int) -> None:
    for number in range(first, first + batches):
        assert store.set(child.keys_of("k", number, COUNT, PAGE)) == [OK] * COUNT


@pytest.fixture
def full(make: Callable[..., Any], child: ModuleType) -> Callable[..., Any]:
    """Open a store and fill its budget, so that every batch to come evicts a segment."""

    def open_full(**options: Any) -> Any:
        store = make(capacity=CAPACITY, nbytes=PAGE, slots=COUNT, **options)
        fill(store, child, 0, 140)
        return store

    return open_full


def right(store: Any, child: ModuleType, first: int, batches: int) -> int:
    """Count pages that are there; Store.get compares their bytes."""
    found = 0
    for number in range(first, first + batches):
        statuses = store.get(child.keys_of("k", number, COUNT, PAGE))
        assert set(statuses) <= {OK, MISS}
        found += statuses.count(OK)
    return found


@pytest.mark.clause("C15")
def test_c15_evicted_files_become_the_next_segments_and_no_byte_is_wrong(
    full: Callable[..., Any], make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    store = full()
    before = segments(root)
    fill(store, child, 140, 300)
    after = segments(root)
    assert len(before.keys() & after.keys()) > 100, "the files were used again"
    assert not {path.name for path in before.values()} & {path.name for path in after.values()}
    assert root_nbytes(root) <= CAPACITY + CAPACITY // 128
    assert right(store, child, 0, 440) > 100 * COUNT
    other = make(nbytes=PAGE, slots=COUNT)
    assert right(other, child, 0, 440) > 100 * COUNT
    store.close()
    other.close()
    assert right(make(nbytes=PAGE, slots=COUNT), child, 0, 440) > 100 * COUNT


def test_a_segment_that_is_being_read_is_not_written_over(
    full: Callable[..., Any], make: Callable[..., Any], child: ModuleType
) -> None:
    store, reader = full(), make(nbytes=PAGE, slots=COUNT, read_only=True)  # which leaves no marks
    keys = child.keys_of("k", 139, COUNT, PAGE)
    assert reader.get(keys) == [OK] * COUNT
    opened = reader.storage._state()
    catalog = opened.current()
    segment = catalog.segment(catalog.look(digests_of([keys[3].encode()]))[0] >> RECORD_BITS)
    assert segment is not None
    handle = opened.space.handles.take(segment)
    contents = os.pread(handle.seg, segment.header.nbytes, 0)
    assert child.page(keys[3], PAGE) in contents
    fill(store, child, 140, 300)
    assert os.pread(handle.seg, segment.header.nbytes, 0) == contents
    assert os.fstat(handle.seg).st_nlink == 0, "evicted, and unlinked since it was open"
    opened.space.handles.give(handle)
    assert reader.get(keys) == [MISS] * COUNT


@pytest.mark.parametrize("moment", ["before its journal is locked", "after its data is opened"])
def test_a_segment_that_is_taken_over_while_it_is_opened_is_gone(
    full: Callable[..., Any],
    make: Callable[..., Any],
    child: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    store, reader = full(), make(nbytes=PAGE, slots=COUNT)
    keys = child.keys_of("k", 139, COUNT, PAGE)
    assert reader.storage.batch_contains(keys) == [OK] * COUNT
    ours = threading.get_ident()
    evicted: list[bool] = []

    def evict() -> None:
        if not evicted and threading.get_ident() == ours:
            evicted.append(True)
            thread = threading.Thread(target=fill, args=(store, child, 140, 300))
            thread.start()
            thread.join()

    if moment == "before its journal is locked":
        real_lock = _segment.lock_shared

        def lock(fd: int) -> bool:
            evict()
            return real_lock(fd)

        monkeypatch.setattr(_segment, "lock_shared", lock)
    else:
        real_open = _segment.Folder.open

        def open_file(self: Any, name: str, flags: int = os.O_RDONLY) -> int:
            fd = real_open(self, name, flags)
            if name.endswith(".seg"):
                evict()
            return fd

        monkeypatch.setattr(_segment.Folder, "open", open_file)
    assert reader.get(keys) == [MISS] * COUNT
    assert evicted


def test_an_opener_waits_for_nobody_while_a_segment_is_being_taken_over(
    full: Callable[..., Any], make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    full().close()
    reader = make(nbytes=PAGE, slots=COUNT)
    held = [os.open(path, os.O_RDWR) for path in Path(root).rglob("*.idx")]
    try:
        assert all(map(lock_alone, held))
        assert reader.get(child.keys_of("k", 130, COUNT, PAGE)) == [MISS] * COUNT
    finally:
        for fd in held:
            os.close(fd)


def test_a_file_with_another_name_is_not_written_over(
    full: Callable[..., Any], child: ModuleType, root: str, tmp_path: Path
) -> None:
    store = full()
    saved = tmp_path / "saved"
    saved.mkdir()
    contents = {}
    for path in segments(root).values():
        os.link(path, saved / path.name)
        contents[path.name] = path.read_bytes()
    opened = {segment.name for segment in store.storage._state().space.own.values()}
    fill(store, child, 140, 300)
    kept = [name for name in contents if name.removesuffix(".seg") not in opened]
    assert len(kept) > 100
    assert [name for name in kept if (saved / name).read_bytes() != contents[name]] == []
    assert right(store, child, 0, 440) > 100 * COUNT


@pytest.mark.parametrize("options", [{"checksum": False}, {"fsync": True}, {"network": True}])
def test_files_are_used_again_only_where_a_checksum_vouches_and_nothing_is_flushed(
    full: Callable[..., Any], child: ModuleType, root: str, options: dict[str, Any]
) -> None:
    store = full(**options)
    held = {inode: os.open(path, os.O_RDONLY) for inode, path in segments(root).items()}
    try:  # an inode that is held is not given to a new file
        fill(store, child, 140, 150)
        assert len(held.keys() & segments(root).keys()) <= 4
    finally:
        for fd in held.values():
            os.close(fd)


class TestSpares:
    """With a budget of 512 MiB, whose segments of 4 MiB are the least that are made ahead of need."""

    CAPACITY = 512 << 20
    NBYTES = 256 << 10

    @pytest.fixture
    def store(self, make: Callable[..., Any]) -> Any:
        return make(capacity=self.CAPACITY, nbytes=self.NBYTES, slots=32)

    def write(self, store: Any, child: ModuleType, label: str, batches: int = 12) -> None:
        for number in range(batches):
            keys = child.keys_of(label, number, 32, self.NBYTES)
            assert store.set(keys) == [OK] * 32

    def test_a_quick_writer_has_the_next_two_ready_and_gives_them_back(
        self, store: Any, child: ModuleType, root: str
    ) -> None:
        self.write(store, child, "k")
        store.storage._state().space.janitor.flush(5.0)
        spares = store.storage._state().writer._spares
        assert len(spares._ready) == 2
        assert store.storage.usage().store_bytes == root_nbytes(root)
        ready = [made.segment.name for made in spares._ready]
        store.close()
        assert not any(path.stem in ready for path in Path(root).rglob("*.seg"))

    def test_a_slow_writer_has_none(
        self, store: Any, child: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache_file._spares._PACE_S", 0.0)
        self.write(store, child, "k")
        assert store.storage._state().writer._spares._ready == []

    def test_a_small_store_has_none(self, full: Callable[..., Any]) -> None:
        assert full().storage._state().writer._spares._ready == []

    def test_clear_drops_them_and_what_is_set_later_is_of_the_new_epoch(
        self, store: Any, make: Callable[..., Any], child: ModuleType
    ) -> None:
        self.write(store, child, "old")
        other = make(nbytes=self.NBYTES, slots=32)
        assert other.storage.clear() == 12 * 32
        store.storage._state().space.janitor.flush(5.0)
        spares = store.storage._state().writer._spares
        assert len(spares._ready) == 2
        assert spares.take(other.storage._state().current().epoch, self.NBYTES) is None
        assert spares.take(spares._ready[0].segment.header.epoch, 5 << 20) is None, "too small for such pages"
        self.write(store, child, "new", 2)
        assert other.get(child.keys_of("new", 1, 32, self.NBYTES)) == [OK] * 32
        assert other.get(child.keys_of("old", 11, 32, self.NBYTES)) == [MISS] * 32
        epoch = store.storage._state().current().epoch
        store.storage._state().space.janitor.flush(5.0)
        assert {made.segment.header.epoch for made in store.storage._state().writer._spares._ready} <= {epoch}

    def test_those_of_a_killed_writer_are_removed_by_the_next_opener(
        self, make: Callable[..., Any], child: ModuleType, root: str
    ) -> None:
        pid = os.fork()
        if pid == 0:
            store = child.Store(root, capacity=self.CAPACITY, nbytes=self.NBYTES, slots=32)
            self.write(store, child, "k")
            store.storage._state().space.janitor.flush(5.0)
            os._exit(len(store.storage._state().writer._spares._ready))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
        left = root_nbytes(root)
        store = make(nbytes=self.NBYTES, slots=32)
        assert store.storage.usage().store_bytes == root_nbytes(root) <= left - (8 << 20)
        assert store.get(child.keys_of("k", 11, 32, self.NBYTES)) == [OK] * 32

    def test_others_that_need_the_room_get_it(
        self, store: Any, make: Callable[..., Any], child: ModuleType, root: str
    ) -> None:
        self.write(store, child, "k", 70)
        second = make(nbytes=self.NBYTES, slots=32)
        self.write(second, child, "s", 70)
        assert root_nbytes(root) <= self.CAPACITY + (4 << 20)
        assert second.get(child.keys_of("s", 69, 32, self.NBYTES)) == [OK] * 32

    def test_what_cannot_be_made_ahead_is_made_when_needed(
        self, store: Any, child: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failures: list[int] = []

        def fail(self: Spares, ledger: Any) -> None:
            failures.append(1)
            raise OSError(5, "as a disk that fails")

        monkeypatch.setattr(Spares, "fill", fail)
        self.write(store, child, "k")
        assert failures
        assert store.get(child.keys_of("k", 11, 32, self.NBYTES)) == [OK] * 32


def void(store: Any, child: ModuleType) -> list[str]:
    """Fill on until segments are declared deleted and still there; give their names."""
    evictor = store.storage._state().writer.evictor
    number = 140
    while not evictor._void and number < 150:
        fill(store, child, number, 1)
        number += 1
    return [victim.name for victim, _ in evictor._void]


def test_a_new_opener_does_not_find_what_is_declared_deleted_and_still_there(
    full: Callable[..., Any], make: Callable[..., Any], child: ModuleType
) -> None:
    store = full()
    waiting = void(store, child)
    assert waiting
    assert set(waiting) <= {path.stem for path in segments(store.storage.options.root).values()}
    other = make(nbytes=PAGE, slots=COUNT)
    for number in range(150):
        keys = child.keys_of("k", number, COUNT, PAGE)
        assert other.contains(keys) == store.contains(keys)
    store.close()
    assert not {path.stem for path in segments(store.storage.options.root).values()} & set(waiting)


def test_a_namespace_that_vanished_leaves_no_trouble_behind(
    full: Callable[..., Any], make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    other = full(tenant="b")
    assert void(other, child)
    shutil.rmtree(Path(root) / other.namespace.id)
    store = make(tenant="a", nbytes=PAGE, slots=COUNT)
    store.storage._state().writer.evictor._void.extend(other.storage._state().writer.evictor._void)
    fill(store, child, 0, 200)
    assert right(store, child, 100, 100) > 50 * COUNT
