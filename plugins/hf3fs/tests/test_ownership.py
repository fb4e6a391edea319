"""Whose pages a page file holds: one of two databases that give them out would read what the other stored."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import closing

import pytest
from hf3fs_builders import NBYTES, Opener, an_arena, keys_of

from hicache_core import Status
from hicache_core.errors import BackendUnavailable
from hicache_hf3fs.harness import Hf3fsHarness
from hicache_hf3fs.metadata import PageFileConflict
from hicache_hf3fs.pagefile import open_page_file

OK, MISS, ERROR, UNAVAILABLE = Status.OK, Status.MISS, Status.ERROR, Status.UNAVAILABLE

_OPEN = """
import sys
from hicache_core import *
from hicache_core.factory import StorageBackendFactory
component = Component("kv", shard="whole", byte_order="page_first", format="bf16", page_nbytes=4096)
identity = Identity.for_tests()
config = HiCacheStorageConfig(namespace=Namespace.of(identity), identity=identity, placement=Placement())
pool = HostPool.from_buffer(bytearray(8 * 4096), component)
options = {"root": sys.argv[1], "file_size": 64 * 4096, "metadata_path": sys.argv[2]}
try:
    StorageBackendFactory.create_backend("hf3fs", config, [pool], **options).close()
except HiCacheError as error:
    print(error)
"""


@pytest.mark.clause("C2", "C9")
def test_a_database_that_was_replaced_gives_out_no_page_any_more(opener: Opener):
    """A, then B on the same files, then A again: A's rows named pages that hold what B has stored."""
    arena, first, second = an_arena(8), str(opener.root / "a.sqlite"), str(opener.root / "b.sqlite")
    with closing(opener(arena, metadata_path=first, checksum=False)) as one:
        assert one.batch_set(keys_of(4), arena.pages(range(4))) == [OK] * 4
    with closing(opener(arena, metadata_path=second, checksum=False)) as other:
        assert other.batch_get(keys_of(4), arena.pages(range(4, 8))) == [MISS] * 4
        assert other.batch_set(keys_of(4), arena.pages([3, 2, 1, 0])) == [OK] * 4
    with pytest.raises(PageFileConflict) as caught:
        opener(arena, metadata_path=first, checksum=False)
    assert "another database gives out its pages" in str(caught.value)
    assert "Name that database" in caught.value.remedy
    with closing(opener(arena, metadata_path=second, checksum=False)) as other:
        assert other.batch_get(keys_of(4), arena.pages(range(4, 8))) == [OK] * 4
        arena.check({4 + i: bytes([4 - i]) * NBYTES for i in range(4)})


def test_a_file_in_use_with_metadata_of_its_own_is_taken_over_by_nobody(opener: Opener):
    arena = an_arena(2)
    storage = opener(arena, metadata_path=str(opener.root / "a.sqlite"))
    assert storage.batch_set(keys_of(1), arena.pages([0])) == [OK]
    command = [sys.executable, "-c", _OPEN, str(opener.root), str(opener.root / "b.sqlite")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "is in use with other metadata" in said
    assert "name another root" in said
    assert storage.batch_get(keys_of(1), arena.pages([1])) == [OK]
    storage.close()
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == ""


@pytest.mark.clause("C2", "C10")
def test_the_clients_of_a_server_whose_files_were_taken_over_read_and_write_nothing(
    opener: Opener, caplog: pytest.LogCaptureFixture
):
    arena, harnesses = an_arena(4), [Hf3fsHarness({}), Hf3fsHarness({})]
    try:
        for harness in harnesses:
            harness.start()
        urls = [harness.options()["metadata_url"] for harness in harnesses]
        one = opener(arena, metadata_url=urls[0], checksum=False)
        assert one.batch_set(keys_of(2), arena.pages([0, 1])) == [OK] * 2
        other = opener(arena, metadata_url=urls[1], checksum=False)
        assert other.batch_set(keys_of(2), arena.pages([1, 0])) == [OK] * 2
        with caplog.at_level(logging.WARNING, logger="hicache.hf3fs"):
            assert one.batch_get(keys_of(2), arena.pages([2, 3])) == [ERROR] * 2
            assert one.batch_set(keys_of(2, "more"), arena.pages([0, 1])) == [ERROR] * 2
        assert "another database gives out its pages" in caplog.text
        assert other.batch_get(keys_of(2), arena.pages([2, 3])) == [OK] * 2
        arena.check({2: b"\2" * NBYTES, 3: b"\1" * NBYTES})
        for storage in (one, other):
            storage.close()
    finally:
        for harness in harnesses:
            harness.stop()


@pytest.mark.clause("C2")
@pytest.mark.parametrize("verb", ["get", "set"])
def test_what_was_read_or_written_while_the_file_changed_hands_counts_for_nothing(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, verb: str
):
    arena = an_arena(2)
    storage = opener(arena, checksum=False)
    assert storage.batch_set(keys_of(1), arena.pages([0])) == [OK]
    file, mover = storage._files[arena.component.key], storage._client
    move = getattr(mover, "read" if verb == "get" else "write")

    def slow(*arguments, **options):
        os.pwrite(file.fd, b"\7" * 16, file._owner_at)
        move(*arguments, **options)

    monkeypatch.setattr(mover, "read" if verb == "get" else "write", slow)
    if verb == "get":
        assert storage.batch_get(keys_of(1), arena.pages([1])) == [UNAVAILABLE]
    else:
        assert storage.batch_set(keys_of(1, "new"), arena.pages([0])) == [UNAVAILABLE]
        assert storage.batch_contains(keys_of(1, "new")) == [MISS]


def test_two_storages_that_were_served_anew_go_on_together(opener: Opener):
    """Their server lost its database: the first to be told takes the file over for both."""
    harness = Hf3fsHarness({})
    harness.start()
    try:
        arena = an_arena(4)
        storages = [opener(arena, metadata_url=harness.options()["metadata_url"]) for _ in range(2)]
        assert storages[0].batch_set(keys_of(2), arena.pages([0, 1])) == [OK] * 2
        harness.kill()
        for leftover in harness._database().parent.glob("*.sqlite*"):
            leftover.unlink()
        harness.restart()
        assert storages[0].batch_set(keys_of(2), arena.pages([1, 0])) == [OK] * 2
        assert storages[1].batch_get(keys_of(2), arena.pages([2, 3])) == [OK] * 2
        arena.check({2: b"\2" * NBYTES, 3: b"\1" * NBYTES})
        assert storages[1].batch_set(keys_of(2, "more"), arena.pages([0, 1])) == [OK] * 2
        for storage in storages:
            storage.close()
    finally:
        harness.stop()


def test_a_file_says_who_owns_it(tmp_path):
    with closing(open_page_file(str(tmp_path), "kv", NBYTES, 4 * NBYTES)) as file:
        assert file.owner() == ""
        file.own("a" * 32)
    with closing(open_page_file(str(tmp_path), "kv", NBYTES, 4 * NBYTES)) as file:
        assert file.owner() == "a" * 32


def test_a_file_that_another_has_locked_does_not_change_hands(tmp_path):
    with (
        closing(open_page_file(str(tmp_path), "kv", NBYTES, 4 * NBYTES)) as one,
        closing(open_page_file(str(tmp_path), "kv", NBYTES, 4 * NBYTES)) as other,
    ):
        one.own("a" * 32)
        one.keep_others_out()
        with pytest.raises(BackendUnavailable):
            other.own("b" * 32)
        one.let_others_in()
        other.own("b" * 32)
        assert one.owner() == "b" * 32
