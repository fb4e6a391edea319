"""Epochs, removal, moved pages, and other boots (R6, R8, R9)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hicache_core import Status, UnsupportedOperation
from hicache_core.errors import InvalidOptions
from hicache_file import _opening
from hicache_file._budget import pair_nbytes
from hicache_file._format import unpack_journal_head
from hicache_file._rescue import choose

OK, MISS, CORRUPT, DENIED = Status.OK, Status.MISS, Status.CORRUPT, Status.DENIED


def root_nbytes(root: str) -> int:
    return sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())


def journals(root: str) -> list[Path]:
    """List journals, the oldest segment first."""
    return sorted(Path(root).rglob("*.idx"), key=lambda p: unpack_journal_head(p.read_bytes()[:128]).sequence)


@pytest.mark.clause("C9")
def test_c9_clear_is_seen_by_every_instance_and_touches_no_other_namespace(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    one, two, other = make(), make(), make(tenant="other")
    keys = child.keys_of("k", 0, 8)
    assert [s.set(keys) for s in (one, two, other)] == [[OK] * 8] * 3
    assert two.storage.clear() == 8
    assert [s.get(keys) for s in (one, two, other)] == [[MISS] * 8, [MISS] * 8, [OK] * 8]
    assert one.set(keys) == [OK] * 8
    assert [s.get(keys) for s in (one, two, make(), other)] == [[OK] * 8] * 4
    assert one.storage.usage().store_bytes == root_nbytes(root)


def clearing_after_each_append(store: Any, clearer: Any, times: int) -> list[int]:
    """Let ``clearer`` clear behind the next ``times`` appends of ``store``; gives what each clear found."""
    writer = store.storage._opened.writer
    real, cleared = writer.append, []

    def append(batch: Any) -> None:
        real(batch)
        if len(cleared) < times:
            cleared.append(clearer.storage.clear())

    writer.append = append
    return cleared


@pytest.mark.clause("C9")
@pytest.mark.parametrize("clears", [1, 6])
def test_c9_a_set_that_meets_clears_stores_again(
    make: Callable[..., Any], child: ModuleType, clears: int
) -> None:
    store, clearer = make(lanes=1), make()
    keys = child.keys_of("k", 0, 8)
    cleared = clearing_after_each_append(store, clearer, clears)
    assert store.set(keys) == [OK] * 8
    assert cleared == [8] * clears
    assert [s.get(keys) for s in (store, clearer, make())] == [[OK] * 8] * 3


@pytest.mark.clause("C9", "C11")
def test_c9_a_set_among_clears_without_end_gives_up_at_its_deadline(
    make: Callable[..., Any], child: ModuleType
) -> None:
    store, clearer = make(lanes=1, timeout_s=0.3), make()
    keys = child.keys_of("k", 0, 8)
    clearing_after_each_append(store, clearer, 1 << 30)
    started = time.monotonic()
    assert store.set(keys) == [Status.TIMEOUT] * 8
    assert 0.3 <= time.monotonic() - started < 10
    assert store.get(keys) == [MISS] * 8


@pytest.mark.clause("C9")
def test_c9_a_get_that_meets_a_clear_misses(make: Callable[..., Any], child: ModuleType) -> None:
    store, clearer = make(), make()
    keys = child.keys_of("k", 0, 8)
    assert store.set(keys) == [OK] * 8
    reader = store.storage._opened.reader
    real = reader.read

    def read(*given: Any) -> None:
        real(*given)
        clearer.storage.clear()

    reader.read = read
    assert store.get(keys) == [MISS] * 8


@pytest.mark.clause("C9")
def test_c9_a_clearer_killed_before_its_unlinks_has_cleared(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    store = make()
    keys = child.keys_of("k", 0, 8)
    assert store.set(keys) == [OK] * 8
    store.close()
    other = make()
    space = other.storage._opened.space
    with space.epoch.lock.held(1.0):
        space.epoch.advance(0)  # and here the clearer dies
    assert other.get(keys) == [MISS] * 8
    assert len(journals(root)) >= 1
    late = make()
    assert late.get(keys) == [MISS] * 8
    assert journals(root) == []
    assert late.set(keys) == [OK] * 8
    assert late.storage.usage().store_bytes == root_nbytes(root)


@pytest.mark.clause("C15")
def test_c15_void_segments_go_first_and_without_a_second_chance(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    store = make(capacity="4mib")
    keys = child.keys_of("k", 0, 64)
    assert store.set(keys) == [OK] * 64
    assert store.get(keys) == [OK] * 64
    space = store.storage._opened.space
    with space.epoch.lock.held(1.0):
        space.epoch.advance(0)
    writer = make(tenant="b", capacity="4mib")
    for number in range(4):
        assert writer.set(child.keys_of("b", number, 64)) == [OK] * 64
    assert root_nbytes(root) <= 4 << 20
    assert store.get(keys) == [MISS] * 64


def test_a_removal_names_a_copy_and_survives_restarts(make: Callable[..., Any], child: ModuleType) -> None:
    one, two = make(), make()
    keys = child.keys_of("k", 0, 4)
    assert one.set(keys) == [OK] * 4
    assert two.storage.batch_remove([keys[1], keys[2], "absent"]) == [OK, OK, MISS]
    assert [s.contains(keys) for s in (one, two, make())] == [[OK, MISS, MISS, OK]] * 3
    assert one.set(keys[1:2]) == [OK]
    assert [s.contains(keys) for s in (one, two, make())] == [[OK, OK, MISS, OK]] * 3
    for store in (one, two):
        store.close()
    assert make().get(keys) == [OK, OK, MISS, OK]


def test_removals_beyond_the_ring_are_all_seen(make: Callable[..., Any], child: ModuleType) -> None:
    one, two = make(nbytes=4096, slots=700), make(nbytes=4096, slots=700)
    keys = child.keys_of("k", 0, 700, 4096)
    assert one.set(keys) == [OK] * 700
    assert two.contains(keys) == [OK] * 700
    for start in range(0, 600, 60):
        assert one.storage.batch_remove(keys[start : start + 60]) == [OK] * 60
    assert two.contains(keys) == [MISS] * 600 + [OK] * 100
    assert two.get(keys[600:]) == [OK] * 100


@pytest.mark.clause("C15", "C6")
def test_c15_a_page_removed_while_it_is_moved_stays_removed(
    make: Callable[..., Any], child: ModuleType
) -> None:
    store, other = make(capacity="2mib", lanes=1), make(lanes=1)
    used = child.keys_of("used", 0, 8)
    assert store.set(used) == [OK] * 8
    assert store.get(used) == [OK] * 8
    from hicache_file import _rescue

    real, removed = _rescue._copy, []

    def copy(*given: Any, **named: Any) -> Any:
        done = real(*given, **named)
        if not removed:  # the copies are made, not yet published
            removed.extend(other.storage.batch_remove(used))
        return done

    _rescue._copy = copy
    try:
        for number in range(20):
            store.set(child.keys_of("flood", number, 8))
    finally:
        _rescue._copy = real
    assert removed.count(OK) >= 2  # those that were about to be kept
    assert [s.contains(used) for s in (store, other, make())] == [[MISS] * 8] * 3


@pytest.mark.clause("C5", "C15")
@pytest.mark.parametrize("when", ["before", "after"])
def test_c5_a_moved_page_that_was_damaged_stays_corrupt(
    make: Callable[..., Any], child: ModuleType, root: str, when: str
) -> None:
    store = make(capacity="8mib", lanes=1)
    used = child.keys_of("used", 0, 3)
    assert store.set(used) == [OK] * 3
    assert store.get(used) == [OK] * 3
    store.close()
    if when == "before":
        damage(journals(root)[0], number=1)
    store = make(lanes=1)
    first = journals(root)[0]
    number = 0
    while first.exists():
        assert store.set(child.keys_of("flood", number, 8)) == [OK] * 8
        number += 1
    if when == "after":
        (moved,) = (path for path in journals(root) if holds(path, used[1], child))
        damage(moved, number=1)
    assert store.get(used) == [OK, CORRUPT, OK]
    assert make().get(used) == [OK, CORRUPT, OK]


def damage(journal: Path, number: int) -> None:
    with journal.with_suffix(".seg").open("r+b") as file:
        file.seek(number * 16384 + 99)
        file.write(b"damaged")


def holds(journal: Path, key: str, child: ModuleType) -> bool:
    return child.page(key)[:64] in journal.with_suffix(".seg").read_bytes()


@pytest.fixture
def another_boot(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Open stores as if in an earlier boot, while the context lasts."""

    class Boot:
        def __enter__(self) -> None:
            monkeypatch.setattr(_opening, "boot_id", lambda: b"an earlier boot!")

        def __exit__(self, *_: object) -> None:
            monkeypatch.undo()

    return Boot


@pytest.mark.parametrize(
    ("options", "seen"),
    [({}, OK), ({"checksum": False}, MISS), ({"checksum": False, "fsync": True}, OK), ({"fsync": True}, OK)],
    ids=["checksums", "no checksums", "no checksums but synced", "synced"],
)
def test_segments_of_another_boot_are_verified_or_dropped(
    make: Callable[..., Any], child: ModuleType, another_boot: Any, options: dict[str, Any], seen: Status
) -> None:
    keys = child.keys_of("k", 0, 4)
    with another_boot():
        before = make(**options)
        assert before.set(keys) == [OK] * 4
        assert before.get(keys) == [OK] * 4
        before.close()
    store = make(**options)
    assert store.get(keys) == [seen] * 4
    assert store.contains(keys) == [seen] * 4
    assert store.set(keys) == [OK] * 4
    assert store.get(keys) == [OK] * 4


def test_an_unsynced_page_that_a_power_loss_ate_is_corrupt_even_with_checksums_off(
    make: Callable[..., Any], child: ModuleType, root: str, another_boot: Any
) -> None:
    keys = child.keys_of("k", 0, 4)
    with another_boot():
        before = make(lanes=1)
        assert before.set(keys) == [OK] * 4
        before.close()
    damage(journals(root)[0], number=2)
    assert make(checksum=False).get(keys) == [OK, OK, CORRUPT, OK]


def test_a_reboot_counts_the_files_and_cuts_what_was_open(
    make: Callable[..., Any], child: ModuleType, root: str, another_boot: Any, start: Callable[..., Any]
) -> None:
    writer = start("write", root, count=1)
    writer.line()
    writer.kill()
    writer.end()
    books = Path(root) / "hicache.root"
    os.truncate(books, 128)  # the table of open segments did not reach the disk
    with another_boot():
        store = make()
        assert store.storage.usage().store_bytes == root_nbytes(root)
        assert root_nbytes(root) < 2 << 20
        store.close()


@pytest.mark.clause("C13")
def test_c13_a_reader_refuses_to_write(make: Callable[..., Any], child: ModuleType, root: str) -> None:
    writer = make(capacity="64mib")
    keys = child.keys_of("k", 0, 4)
    assert writer.set(keys) == [OK] * 4
    before = {path: path.read_bytes() for path in Path(root).rglob("*") if path.is_file()}
    reader = make(read_only=True)
    assert reader.get(keys) == [OK] * 4
    assert reader.set(child.keys_of("new", 0, 2)) == [DENIED] * 2
    assert reader.storage.touch(keys) is None
    with pytest.raises(UnsupportedOperation):
        reader.storage.batch_remove(keys)
    with pytest.raises(UnsupportedOperation):
        reader.storage.clear()
    capabilities = reader.storage.capabilities
    assert (capabilities.remove, capabilities.clear, capabilities.eviction) == (False, False, "none")
    assert {path: path.read_bytes() for path in before} == before


def test_a_reader_that_came_first_sees_what_is_written_later(
    make: Callable[..., Any], child: ModuleType
) -> None:
    make(tenant="other")
    reader = make(read_only=True)
    keys = child.keys_of("k", 0, 4)
    assert (reader.contains(keys), reader.get(keys)) == ([MISS] * 4, [MISS] * 4)
    assert reader.storage.usage().pages == 0
    writer = make()
    assert writer.set(keys) == [OK] * 4
    assert (reader.contains(keys), reader.get(keys)) == ([OK] * 4, [OK] * 4)
    assert writer.storage.clear() == 4
    assert reader.get(keys) == [MISS] * 4


def test_on_a_network_file_system_less_is_promised(
    make: Callable[..., Any], child: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(network=True, checksum=False, capacity="64mib")
    capabilities = store.storage.capabilities
    assert (capabilities.deadline, capabilities.checksum, capabilities.shared, capabilities.clear) == (
        "none",
        True,
        True,
        True,
    )
    keys = child.keys_of("k", 0, 4)
    assert store.set(keys) == [OK] * 4
    assert store.get(keys) == [OK] * 4
    store.close()
    monkeypatch.setattr(_opening, "flock_works", lambda *_: False)
    lockless = make(network=True, root=store.storage.options.root + "-lockless")
    capabilities = lockless.storage.capabilities
    assert (capabilities.shared, capabilities.clear, capabilities.eviction) == (False, False, "none")
    assert lockless.set(keys) == [OK] * 4
    assert lockless.get(keys) == [OK] * 4


def test_pair_nbytes_of_nothing_is_nothing(make: Callable[..., Any]) -> None:
    assert pair_nbytes(make().storage._opened.folder, "00" * 16) == 0


def test_without_flock_one_process_works_alone(
    make: Callable[..., Any], child: ModuleType, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no flock here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(InvalidOptions, match="capacity needs file locks"):
        make(network=True, capacity="1gib")
    store = make(network=True)
    assert (store.storage.capabilities.shared, store.storage.capabilities.clear) == (False, False)
    keys = child.keys_of("k", 0, 8)
    assert store.set(keys) == [OK] * 8
    store.close()
    assert root_nbytes(root) < 1 << 20
    assert make(network=True).get(keys) == [OK] * 8


@pytest.mark.clause("C12")
def test_c12_descriptors_of_cleared_segments_are_given_back(
    make: Callable[..., Any], child: ModuleType
) -> None:
    reader, writer = make(), make(segment_size="64kib")
    for number in range(10):
        keys = child.keys_of("k", number, 4)
        assert writer.set(keys) == [OK] * 4
        assert reader.get(keys) == [OK] * 4
    handles = reader.storage._opened.space.handles
    assert handles.open_files() >= 20
    writer.storage.clear()
    assert reader.contains(keys) == [MISS] * 4
    assert handles.open_files() == 0


def test_the_latest_used_are_chosen_up_to_the_limit_but_one_at_least() -> None:
    lengths = np.array([10, 10, 10, 10, 40], np.uint64)
    last_use = np.array([0, 5, 9, 7, 6])
    chosen = [choose(lengths, last_use, most).tolist() for most in (0, 19, 20, 60, 1000)]
    assert chosen == [[2], [2], [2, 3], [2, 3, 4], [1, 2, 3, 4]]
    assert choose(lengths, np.zeros(5), 100).tolist() == []
