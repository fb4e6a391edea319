"""Upkeep: what a root holds, and whether it is still what was set."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hicache_core import Identity, Status, UnsupportedOperation, Verified

OK, MISS = Status.OK, Status.MISS
NBYTES = 16384


def verified(store: Any, **given: bool) -> Verified:
    return sum(store.storage.verify(**given), Verified())


def segments(root: str, store: Any) -> list[Path]:
    return sorted((Path(root) / store.namespace.id).glob("*.seg"))


def test_a_reader_lists_every_namespace_and_makes_none(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    one, two = make(tenant="one"), make(tenant="two")
    one.set(child.keys_of("k", 0, 5))
    two.set(child.keys_of("k", 0, 3))
    before = sorted(os.listdir(root))
    reader = make(tenant="nobody", read_only=True)
    found = {use.id: use for use in reader.storage.namespaces()}
    assert {use.id: (use.pages, use.bytes) for use in found.values()} == {
        one.namespace.id: (5, 5 * NBYTES),
        two.namespace.id: (3, 3 * NBYTES),
    }
    assert Identity.of_manifest(found[two.namespace.id].manifest) == Identity.for_tests(tenant="two")
    assert sorted(os.listdir(root)) == before


def test_a_reader_tells_what_the_root_takes_and_may_take(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    from hicache_core import Usage

    store = make(capacity="64mib")
    store.set(child.keys_of("k", 0, 5))
    own = store.storage.usage()
    assert (own.store_bytes > 5 * NBYTES, own.capacity) == (True, 64 << 20)
    assert make(read_only=True).storage.usage() == own
    nobody = make(read_only=True, tenant="nobody").storage.usage()
    assert nobody == Usage(0, 0, own.store_bytes, own.capacity)


def test_when_a_namespace_was_written_is_its_last_set_and_not_its_last_use(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    store = make(capacity="1gib")
    keys = child.keys_of("k", 0, 2)
    store.set(keys)
    for path in segments(root, store):
        os.utime(path, (1000.0, 1000.0))
    store.get(keys)
    (use,) = store.storage.namespaces()
    assert use.written_s == 1000.0


def test_listing_leaves_no_descriptor_and_no_thread(make: Callable[..., Any], child: ModuleType) -> None:
    store = make()
    store.set(child.keys_of("k", 0, 4))
    store.storage.namespaces()
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(5):
        store.storage.namespaces()
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"identity": 5}'])
def test_a_manifest_that_cannot_be_read_hides_no_namespace(
    make: Callable[..., Any], child: ModuleType, root: str, text: str
) -> None:
    store = make()
    store.set(child.keys_of("k", 0, 2))
    (Path(root) / store.namespace.id / "manifest.json").write_text(text)
    (Path(root) / ("0" * 32)).mkdir()
    (Path(root) / "lost+found").mkdir()
    assert [(use.id, use.manifest, use.pages) for use in store.storage.namespaces()] == [
        (store.namespace.id, None, 2)
    ]


@pytest.mark.clause("C5")
@pytest.mark.parametrize("capacity", [None, "64mib"])
def test_c5_verify_reads_pages_of_all_sizes_and_segments(
    make: Callable[..., Any], child: ModuleType, root: str, capacity: str | None
) -> None:
    given = {"capacity": capacity} if capacity else {}
    small, large = make(nbytes=1000, **given), make(nbytes=100_000, slots=64, **given)
    small.set(child.keys_of("s", 0, 60, 1000))
    for batch in range(3):
        large.set(child.keys_of("l", batch, 60, 100_000))
    assert len(segments(root, small)) > 1
    assert verified(small) == Verified(pages=240, bytes=60_000 + 18_000_000)


@pytest.mark.clause("C5")
def test_c5_a_reader_finds_damage_and_may_not_remove_it(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    store = make(lanes=1)
    keys = child.keys_of("k", 0, 8)
    store.set(keys)
    (path,) = segments(root, store)
    with path.open("r+b") as file:
        file.seek(5 * NBYTES)
        file.write(b"\0" * 100)
    reader = make(read_only=True)
    assert verified(reader) == Verified(pages=8, bytes=8 * NBYTES, damaged=1)
    with pytest.raises(UnsupportedOperation) as caught:
        reader.storage.verify(remove=True)
    assert caught.value.capability == "remove"
    assert verified(store, remove=True) == Verified(pages=8, bytes=8 * NBYTES, damaged=1, removed=1)
    assert store.contains(keys) == [OK] * 5 + [MISS] + [OK] * 2
    assert reader.contains(keys) == [OK] * 5 + [MISS] + [OK] * 2


def test_a_page_that_the_disk_cannot_read_is_damaged(
    make: Callable[..., Any], child: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(lanes=1)
    store.set(child.keys_of("k", 0, 4))

    def unreadable(*_: Any) -> int:
        raise OSError(errno.EIO, "no such sector")

    monkeypatch.setattr("hicache_file._transfer.os.preadv", unreadable)
    found = verified(store)
    monkeypatch.undo()
    assert found == Verified(pages=4, bytes=4 * NBYTES, damaged=4)


@pytest.mark.clause("C13")
def test_c13_without_checksums_there_is_nothing_to_verify(make: Callable[..., Any]) -> None:
    store = make(checksum=False)
    assert store.storage.capabilities.verify is False
    with pytest.raises(UnsupportedOperation) as caught:
        store.storage.verify()
    assert caught.value.capability == "verify"


def test_a_clear_in_the_middle_ends_a_verification_in_peace(
    make: Callable[..., Any], child: ModuleType
) -> None:
    store = make(nbytes=100_000, slots=64, capacity="64mib")
    for batch in range(4):
        store.set(child.keys_of("l", batch, 60, 100_000))
    pieces = store.storage.verify(remove=True)
    first = next(pieces)
    assert (first.damaged, first.pages > 0) == (0, True)
    assert store.storage.clear() == 240
    rest = sum(pieces, Verified())
    assert (rest.damaged, rest.removed) == (0, 0)
    assert first.pages + rest.pages <= 240


@pytest.mark.clause("C12")
def test_c12_a_close_in_the_middle_is_not_waited_for_and_ends_the_verification(
    make: Callable[..., Any], child: ModuleType
) -> None:
    from hicache_core import StorageClosed

    store = make(nbytes=100_000, slots=64)
    for batch in range(4):
        store.set(child.keys_of("l", batch, 60, 100_000))
    pieces = store.storage.verify()
    next(pieces)
    store.close()
    with pytest.raises(StorageClosed):
        next(pieces)
