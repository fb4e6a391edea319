"""Files that others change while a get looks at them, or after it has: OK is said of bytes that were read."""

from __future__ import annotations

import os

import pytest
from nixl_builders import NBYTES, an_arena, as_a_stranger, file_of, keys_of, page_bytes, stored

from hicache_core import Status
from hicache_nixl.filemoves import Mover
from hicache_nixl.verdicts import Verdicts

OK, CORRUPT = Status.OK, Status.CORRUPT

DIRECT = pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])


@DIRECT
def test_a_page_that_becomes_whole_after_a_look_at_its_trailer_is_read(opened, tmp_path, monkeypatch, direct):
    """As under a restore into the same file; it was OK by its trailer, with nothing in the slot."""
    arena = an_arena(2)
    storage = opened(arena.pool, direct_io=direct)
    keys = keys_of(arena, "a")
    stored(storage, arena, keys)
    path = file_of(tmp_path / "kv", storage, keys[0])
    whole, honest = path.read_bytes(), Mover._measure
    os.truncate(path, 0)

    def late(mover, batch, position):
        path.write_bytes(whole)
        honest(mover, batch, position)

    monkeypatch.setattr(Mover, "_measure", late)
    assert as_a_stranger(storage).batch_get(keys, arena.pages([1])) == [OK]
    arena.check({1: page_bytes(keys[0], NBYTES)})


@DIRECT
def test_a_page_that_becomes_whole_after_a_look_at_its_size_is_not_ok_unread(
    opened, tmp_path, monkeypatch, direct
):
    arena = an_arena(2)
    storage = opened(arena.pool, direct_io=direct)
    keys = keys_of(arena, "a")
    stored(storage, arena, keys)
    path = file_of(tmp_path / "kv", storage, keys[0])
    whole, honest = path.read_bytes(), Verdicts.by_trailer
    os.truncate(path, 100)

    def late(*arguments):
        path.write_bytes(whole)
        return honest(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Verdicts, "by_trailer", late)
        assert as_a_stranger(storage).batch_get(keys, arena.pages([1])) == [CORRUPT]
    arena.check(undefined=[1])
    assert storage.batch_contains(keys) == [OK], "what the file became later is judged anew"
    assert storage.batch_get(keys, arena.pages([1])) == [OK]
    arena.check({1: page_bytes(keys[0], NBYTES)})


def test_a_verdict_ends_with_the_file_that_it_was_of(opened, tmp_path):
    """The next file has the same inode number: of a tmpfs, and of an ext4, at once."""
    arena = an_arena(2)
    storage = opened(arena.pool)
    keys = keys_of(arena, "a")
    stored(storage, arena, keys)
    path = file_of(tmp_path / "kv", storage, keys[0])
    whole = path.read_bytes()
    os.truncate(path, 100)
    assert as_a_stranger(storage).batch_get(keys, arena.pages([1])) == [CORRUPT]
    path.write_bytes(whole)
    before = path.stat()
    assert storage.batch_contains(keys) == [OK]
    assert storage.batch_set(keys, arena.pages([0])) == [OK]
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_verdict_ends_with_a_get_that_reads_the_page_well(opened, tmp_path):
    arena = an_arena(2)
    storage = opened(arena.pool)
    keys = keys_of(arena, "a")
    stored(storage, arena, keys)
    path = file_of(tmp_path / "kv", storage, keys[0])
    storage._store._verdicts.remember(str(path), path.stat())
    assert storage.batch_contains(keys) == [CORRUPT]
    assert storage.batch_get(keys, arena.pages([1])) == [OK]
    assert storage.batch_contains(keys) == [OK]


def test_a_verdict_may_be_forgotten_during_a_look(opened, tmp_path, monkeypatch):
    """By a set in another thread, while the look waits for stat."""
    arena = an_arena(1)
    storage = opened(arena.pool)
    keys = keys_of(arena, "a")
    stored(storage, arena, keys)
    path = str(file_of(tmp_path / "kv", storage, keys[0]))
    verdicts, honest = storage._store._verdicts, os.stat
    verdicts.remember(path, os.stat(path))

    def late(*arguments, **options):
        verdicts.forget(path)
        return honest(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", late)
        assert verdicts.is_bad(path)
    assert not verdicts.is_bad(path)
