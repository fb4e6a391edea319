"""Troubles of a root that others share: clears that cross, limits that are met, files that are damaged."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hicache_core import Status
from hicache_core.errors import BackendUnavailable
from hicache_file import _epoch, _making, _opened
from hicache_file import _format as fmt
from hicache_file._budget import is_open

OK, MISS = Status.OK, Status.MISS


@pytest.mark.clause("C3", "C9")
def test_c9_a_clear_leaves_what_was_set_after_a_later_clear(
    make: Callable[..., Any], child: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, writer, reader = (make(lanes=1) for _ in range(4))
    old, new, newer = (child.keys_of(label, 0, 4) for label in ("old", "new", "newer"))
    assert writer.set(old) == [OK] * 4
    real = _opened.scan_folder

    def scan(folder: Any) -> Any:
        monkeypatch.setattr(_opened, "scan_folder", real)
        assert second.storage.clear() == 0
        assert writer.set(new) == [OK] * 4
        return real(folder)

    monkeypatch.setattr(_opened, "scan_folder", scan)
    assert first.storage.clear() == 4
    assert writer.set(newer) == [OK] * 4
    assert [s.get(new + newer) for s in (writer, reader, make())] == [[OK] * 8] * 3
    assert reader.get(old) == [MISS] * 4


@pytest.mark.clause("C3", "C9")
def test_c9_a_clear_leaves_a_segment_that_is_being_made(
    make: Callable[..., Any], child: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clearer, writer, reader = (make(lanes=1) for _ in range(3))
    old, new = child.keys_of("old", 0, 4), child.keys_of("new", 0, 4)
    assert writer.set(old) == [OK] * 4
    begun, looked = threading.Event(), threading.Event()
    oldest = writer.storage._opened.writer._lanes[0].segment.name
    said: list[list[Status]] = []
    thread = threading.Thread(target=lambda: said.append(writer.set(new)))
    real_scan, real_preallocate, real_read = _opened.scan_folder, _making.preallocate, _opened.read_header

    def preallocate(fd: int, nbytes: int) -> None:
        begun.set()  # both files are there, without a header
        assert looked.wait(10)
        real_preallocate(fd, nbytes)

    def scan(folder: Any) -> Any:
        thread.start()
        assert begun.wait(10)
        monkeypatch.setattr(_opened, "scan_folder", real_scan)
        found = real_scan(folder)
        found.segments.sort(key=lambda name: name == oldest)
        return found

    def read(folder: Any, name: str) -> Any:
        try:
            return real_read(folder, name)
        finally:
            looked.set()

    monkeypatch.setattr(_making, "preallocate", preallocate)
    monkeypatch.setattr(_opened, "scan_folder", scan)
    monkeypatch.setattr(_opened, "read_header", read)
    try:
        assert clearer.storage.clear() == 4
    finally:
        looked.set()
        thread.join(10)
    assert said == [[OK] * 4]
    assert [s.get(new) for s in (writer, reader, make())] == [[OK] * 4] * 3


@pytest.mark.clause("C9", "C14")
def test_c14_a_clear_removes_what_a_dead_writer_left_open(
    make: Callable[..., Any], start: Callable[..., Any], child: ModuleType, root: str
) -> None:
    store = make()
    before = store.storage.usage().store_bytes
    process = start("write", root, label="dead", count=4, lanes=1, capacity="64mib")
    process.line()
    process.kill()
    process.end()
    assert store.storage.clear() >= 4
    assert store.storage.usage().store_bytes < before + 1024


def crowded(root: str, make: Callable[..., Any], child: ModuleType, **options: Any) -> tuple[Any, Any]:
    """Give a writer with an open segment, and another one that has filled the root."""
    writer, other = (make(capacity="1mib", lanes=1, **options) for _ in range(2))
    assert writer.set(child.keys_of("mine", 0, 1)) == [OK]
    for number in range(12):
        assert other.set(child.keys_of("full", number, 4)) == [OK] * 4
    return writer, other


def journal_of(store: Any, root: str) -> str:
    return f"{root}/{store.namespace.id}/{store.storage._opened.writer._lanes[0].segment.name}.idx"


@pytest.mark.clause("C3", "C14")
def test_c14_a_process_out_of_descriptors_leaves_the_segments_of_others_on_the_books(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    writer, other = crowded(root, make, child)
    journal = journal_of(writer, root)
    books = other.storage._opened.root
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with books.held(5.0) as ledger:
        before = [slot.id for slot in ledger.slots if slot.nbytes]
        used = ledger.used
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 4, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            assert ledger.reap() == 0
            with pytest.raises(OSError, match="Too many open files"):
                ledger.recount()
            assert ledger.dirty
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [slot.id for slot in ledger.slots if slot.nbytes] == before
        assert ledger.used == used
    for number in range(40):
        assert other.set(child.keys_of("more", number, 4)) == [OK] * 4
    assert os.path.exists(journal)
    assert writer.set(child.keys_of("mine", 1, 1)) == [OK]
    assert [s.get(child.keys_of("mine", 1, 1)) for s in (writer, other, make())] == [[OK]] * 3


@pytest.mark.clause("C3", "C14")
def test_c14_an_open_segment_is_not_evicted_though_its_entry_is_damaged(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    writer, other = crowded(root, make, child)
    journal = journal_of(writer, root)
    fd = os.open(f"{root}/hicache.root", os.O_RDWR)
    try:
        size = os.fstat(fd).st_size
        raw = bytearray(os.pread(fd, size - 128, 128))
        at = raw.index(bytes.fromhex(os.path.basename(journal)[:-4]))
        os.pwrite(fd, bytes([raw[at] ^ 0xFF]), 128 + at)
    finally:
        os.close(fd)
    for number in range(40):
        assert other.set(child.keys_of("more", number, 4)) == [OK] * 4
    assert os.path.exists(journal)
    assert writer.set(child.keys_of("mine", 1, 1)) == [OK]
    assert [s.get(child.keys_of("mine", 1, 1)) for s in (writer, other, make())] == [[OK]] * 3


@pytest.mark.parametrize(("number", "there"), [(errno.ENOENT, False), (errno.EIO, True)])
def test_a_segment_that_cannot_be_looked_at_may_be_open(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, number: int, there: bool
) -> None:
    def fail(folder: Any, name: str, flags: int = 0) -> int:
        raise OSError(number, "no")

    folder = make().storage._opened.space.folder
    with monkeypatch.context() as patched:
        patched.setattr(type(folder), "open", fail)
        assert is_open(folder, "0" * 32) is there


def replace_epoch(root: str, namespace: str, what: str) -> None:
    """Give a namespace a folder, and in it an epoch file that nobody can read."""
    head = bytearray(fmt.pack_epoch_head(bytes.fromhex(namespace), 32) + fmt.pack_epoch_live(5, 0))
    if what == "damaged":
        head[70] ^= 1
    else:
        head[8:12] = (2 | (2 ^ 0xFFFF) << 16).to_bytes(4, "little")
    folder = Path(root) / namespace
    folder.mkdir(mode=0o700)
    (folder / "epoch").write_bytes(bytes(head).ljust(128 + 32 * 32, b"\0"))


@pytest.mark.clause("C10", "C12")
@pytest.mark.parametrize("what", ["damaged", "unknown"])
def test_c10_a_reader_whose_namespace_cannot_be_read_is_unavailable_and_leaks_nothing(
    make: Callable[..., Any], child: ModuleType, root: str, what: str
) -> None:
    writer, reader = make(tenant="other"), make(read_only=True)
    keys = child.keys_of("k", 0, 2)
    assert writer.set(keys) == [OK] * 2
    assert reader.get(keys) == [MISS] * 2
    replace_epoch(root, reader.namespace.id, what)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert reader.contains(keys) == reader.get(keys) == [Status.UNAVAILABLE] * 2
        with pytest.raises(BackendUnavailable):
            reader.storage.usage()
        found = writer.storage.namespaces()
        assert [use.id for use in found] == [writer.namespace.id]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.clause("C9")
def test_c9_a_follower_takes_no_overwritten_event_for_its_own(
    make: Callable[..., Any], child: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, killed = (make(lanes=1, capacity="8mib", nbytes=1024) for _ in range(3))
    keys = child.keys_of("k", 0, 64, 1024)
    assert one.set(keys) == [OK] * 64
    assert two.contains(keys) == [OK] * 64
    assert one.storage.batch_remove(keys[:10]) == [OK] * 10
    real = _epoch.write_exactly

    def write(fd: int, payload: bytes, offset: int) -> None:
        if len(payload) == fmt.EPOCH_LIVE_NBYTES:
            raise OSError(errno.EIO, "killed after the events and before the live words")
        real(fd, payload, offset)

    with monkeypatch.context() as patched:
        patched.setattr(_epoch, "write_exactly", write)
        assert killed.storage.batch_remove(keys[20:50]) == [Status.UNAVAILABLE] * 30
    assert two.contains(keys[:10]) == [MISS] * 10
    assert two.get(keys[50:]) == [OK] * 14


@pytest.mark.clause("C14")
def test_c14_a_folder_with_a_segments_name_is_left_alone(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    store = make(capacity="4mib")
    keys = child.keys_of("k", 0, 2)
    assert store.set(keys) == [OK] * 2
    for ending in ("idx", "seg", "new"):
        (Path(root) / store.namespace.id / f"{'a' * 32}.{ending}").mkdir()
    store.close()
    again = make()
    assert again.get(keys) == [OK] * 2
    assert again.storage.clear() == 2
    assert again.set(keys) == [OK] * 2


@pytest.mark.clause("C7", "C14")
@pytest.mark.parametrize("at", [30, 70])
def test_c14_damaged_books_do_not_forget_the_budget(
    make: Callable[..., Any], child: ModuleType, root: str, at: int
) -> None:
    store, other = make(capacity="1mib", lanes=1), make(lanes=1)
    assert store.set(child.keys_of("k", 0, 4)) == [OK] * 4
    fd = os.open(f"{root}/hicache.root", os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 0xFF]), at)
    finally:
        os.close(fd)
    later = make(lanes=1) if at < 64 else other
    for number in range(40):
        assert later.set(child.keys_of("more", number, 4)) == [OK] * 4
    for one in (store, later):
        assert one.storage.usage().capacity == 1 << 20
        assert one.storage.usage().store_bytes <= 1 << 20


@pytest.mark.clause("C9", "C14")
@pytest.mark.parametrize("odd", [False, True])
def test_c14_openers_agree_on_the_ring_though_its_head_is_damaged(
    make: Callable[..., Any], child: ModuleType, root: str, odd: bool
) -> None:
    one = make(lanes=1, capacity="64mib", nbytes=1024)
    keys = child.keys_of("k", 0, 64, 1024)
    assert one.set(keys) == [OK] * 64
    assert one.storage.batch_remove(keys[:40]) == [OK] * 40
    path = Path(root) / one.namespace.id / "epoch"
    raw = bytearray(path.read_bytes())
    raw[30] ^= 0xFF
    with path.open("r+b") as file:
        file.write(raw[:64])
    if odd:
        os.truncate(path, 128 + 100 * 32)
    two = make(lanes=1, nbytes=1024)
    assert one.get(keys[40:]) == two.get(keys[40:]) == [MISS if odd else OK] * 24
    slots = [store.storage._opened.space.epoch._slots for store in (one, two, make(nbytes=1024))]
    assert len(set(slots)) == 1
    assert os.stat(path).st_size == 128 + 32 * slots[0]
    assert two.set(keys) == [OK] * 64
    assert one.get(keys) == [OK] * 64
    assert two.storage.batch_remove(keys[:40]) == [OK] * 40
    assert one.get(keys) == [MISS] * 40 + [OK] * 24
    assert one.storage.batch_remove(keys[40:]) == [OK] * 24
    assert two.get(keys) == [MISS] * 64
