"""Troubles of a root that others share: clears that cross, limits that are met, files that are damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from hicache_core import Status
from hicache_file import _making, _opened

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
