"""Whose pages a page file holds: one of two databases that give them out would read what the other stored."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing

import pytest
from hf3fs_builders import NBYTES, Held, Opener, an_arena, keys_of, soon

from hicache_conformance.calls import Call
from hicache_core import Status
from hicache_core.errors import BackendUnavailable
from hicache_hf3fs import pagefile
from hicache_hf3fs.harness import Hf3fsHarness
from hicache_hf3fs.metadata import PageFileConflict, PageRef, Reservation
from hicache_hf3fs.metadata_http import MetadataClient
from hicache_hf3fs.pagefile import open_page_file
from hicache_hf3fs.storage import HiCacheHF3FS

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


def test_two_storages_that_were_served_anew_go_on_together(opener: Opener, own_server):
    """Their server lost its database: the first to be told takes the file over for both."""
    arena, url = an_arena(4), own_server.options()["metadata_url"]
    storages = [opener(arena, metadata_url=url) for _ in range(2)]
    assert storages[0].batch_set(keys_of(2), arena.pages([0, 1])) == [OK] * 2
    lose_database(own_server)
    assert storages[0].batch_set(keys_of(2), arena.pages([1, 0])) == [OK] * 2
    assert storages[1].batch_get(keys_of(2), arena.pages([2, 3])) == [OK] * 2
    arena.check({2: b"\2" * NBYTES, 3: b"\1" * NBYTES})
    assert storages[1].batch_set(keys_of(2, "more"), arena.pages([0, 1])) == [OK] * 2
    for storage in storages:
        storage.close()


def test_a_file_says_who_owns_it(tmp_path):
    with closing(open_page_file(str(tmp_path), "kv", NBYTES, 4 * NBYTES)) as file:
        assert file.owner() == ""
        file.own("a" * 32, alone=False)
    with closing(open_page_file(str(tmp_path), "kv", NBYTES, 4 * NBYTES)) as file:
        assert file.owner() == "a" * 32


def test_a_file_that_another_has_locked_does_not_change_hands(tmp_path):
    with (
        closing(open_page_file(str(tmp_path), "kv", NBYTES, 4 * NBYTES)) as one,
        closing(open_page_file(str(tmp_path), "kv", NBYTES, 4 * NBYTES)) as other,
    ):
        one.own("a" * 32, alone=True)
        one.hold(alone=True)
        with pytest.raises(BackendUnavailable):
            other.own("b" * 32, alone=False)
        one.hold(alone=False)
        other.own("b" * 32, alone=False)
        assert one.owner() == "b" * 32


def lose_database(harness: Hf3fsHarness) -> None:
    harness.kill()
    for leftover in harness._database().parent.glob("*.sqlite*"):
        leftover.unlink()
    harness.restart()


@pytest.fixture
def own_server():
    """A metadata server that one test may do anything to."""
    harness = Hf3fsHarness({})
    harness.start()
    yield harness
    harness.stop()


def test_a_client_that_stopped_half_way_through_a_takeover_spoils_nothing(opener: Opener, own_server):
    """It had told the database of the file, and not the file; the others went on, and were refused later."""
    arena, url = an_arena(4), own_server.options()["metadata_url"]
    storage = opener(arena, metadata_url=url)
    assert storage.batch_set(keys_of(2), arena.pages([0, 1])) == [OK] * 2
    lose_database(own_server)
    file = storage._files[arena.component.key]
    with closing(MetadataClient(url, "0" * 32)) as stopped:
        stopped.initialize(file.rank, file.label, file.owner(), deadline=soon())
    assert storage.batch_get(keys_of(2), arena.pages([2, 3])) == [MISS] * 2
    assert storage.batch_set(keys_of(2), arena.pages([1, 0])) == [OK] * 2
    storage.close()
    with closing(opener(arena, metadata_url=url)) as again:
        assert again.batch_get(keys_of(2), arena.pages([2, 3])) == [OK] * 2
    arena.check({2: b"\2" * NBYTES, 3: b"\1" * NBYTES})


@pytest.mark.clause("C2")
def test_a_page_that_was_looked_up_in_a_database_that_is_no_more_is_not_read(
    opener: Opener, own_server, monkeypatch: pytest.MonkeyPatch
):
    """Another thread's set agrees with the new one meanwhile, and takes the page."""
    arena = an_arena(2)
    storage = opener(arena, metadata_url=own_server.options()["metadata_url"], checksum=False)
    assert storage.batch_set(keys_of(1), arena.pages([0])) == [OK]
    read = storage._client.read

    def late(*arguments, **options):
        lose_database(own_server)
        assert storage.batch_set(keys_of(1, "other"), arena.pages([1])) == [OK]
        read(*arguments, **options)

    monkeypatch.setattr(storage._client, "read", late)
    assert storage.batch_get(keys_of(1), arena.pages([0])) == [UNAVAILABLE]
    storage.close()


def test_metadata_of_its_own_takes_no_file_from_the_clients_of_a_server(opener: Opener, own_server):
    """One start without metadata_url, by mistake."""
    arena, url = an_arena(2), own_server.options()["metadata_url"]
    storage = opener(arena, metadata_url=url)
    assert storage.batch_set(keys_of(1), arena.pages([0])) == [OK]
    with pytest.raises(BackendUnavailable) as caught:
        opener(arena)
    assert "is in use with other metadata" in str(caught.value)
    assert storage.batch_get(keys_of(1), arena.pages([1])) == [OK]
    storage.close()


@pytest.mark.parametrize("metadata", ["server", "local"])
def test_a_file_system_without_locks_will_do(opener: Opener, server: Hf3fsHarness, monkeypatch, metadata):
    def none(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(pagefile.fcntl, "fcntl", none)
    arena = an_arena(2)
    options = {"metadata_url": server.options()["metadata_url"]} if metadata == "server" else {}
    storage = opener(arena, **options)
    assert storage.batch_set(keys_of(1), arena.pages([0])) == [OK]
    assert storage.batch_get(keys_of(1), arena.pages([1])) == [OK]
    storage.close()


def test_a_child_holds_no_page_file(opener: Opener):
    arena = an_arena(1)
    storage = opener(arena)
    assert storage.batch_set(keys_of(1), arena.pages([0])) == [OK]
    child = os.fork()
    if not child:
        try:
            signal.alarm(20)
            signal.pause()
        finally:
            os._exit(0)
    try:
        storage.close()
        opener(arena, metadata_path=str(opener.root / "other.sqlite")).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.clause("C13")
def test_a_child_that_was_forked_while_its_parent_opens_a_root_does_not_share_it(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
):
    """Its metadata was open, and nobody had been told yet that a child must let go of it."""
    serving = Held(monkeypatch, HiCacheHF3FS, "_serve")
    call = Call(lambda: opener(an_arena(1)))
    assert serving.entered.wait(10)
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(20)
            serving.free()
            opener(an_arena(1))
        except BackendUnavailable:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (
        "the child opened what its parent has open"
    )
    serving.go.set()
    call.result().close()


@pytest.mark.parametrize("page", [64, -2])
def test_a_page_that_the_file_has_not_is_neither_read_nor_written(opener: Opener, monkeypatch, page: int):
    """The one behind the last is the label."""
    arena = an_arena(1)
    storage = opener(arena)
    assert storage.batch_set(keys_of(1), arena.pages([0])) == [OK]
    rank = arena.component.key
    monkeypatch.setattr(
        storage._metadata, "get_page_indices", lambda *_, **__: [PageRef(rank, page, NBYTES, None)]
    )
    monkeypatch.setattr(
        storage._metadata, "reserve_and_allocate_page_indices", lambda *_, **__: [Reservation(False, page)]
    )
    assert storage.batch_get(keys_of(1), arena.pages([0])) == [UNAVAILABLE]
    assert storage.batch_set(keys_of(1, "new"), arena.pages([0])) == [UNAVAILABLE]
    storage.close()
    open_page_file(str(opener.root), rank, NBYTES, 64 * NBYTES).close()


def test_two_that_take_a_file_over_for_one_database_do_not_refuse_each_other(tmp_path):
    with (
        closing(open_page_file(str(tmp_path), "kv", NBYTES, 4 * NBYTES)) as one,
        closing(open_page_file(str(tmp_path), "kv", NBYTES, 4 * NBYTES)) as other,
    ):
        one.own("a" * 32, alone=False)
        assert one._lock(pagefile._ALONE, fcntl.F_WRLCK), "one is about to write"
        late = threading.Timer(0.05, one.own, ("b" * 32,), {"alone": False})
        late.start()
        other.own("b" * 32, alone=False)
        late.join()
        assert other.owner() == "b" * 32
