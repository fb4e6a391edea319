"""What SGLang's HiCacheHF3FS (0.5.23) was seen to do, and this backend must not.

Upstream: sglang/srt/mem_cache/storage/hf3fs/{storage_hf3fs,hf3fs_usrbio_client,mini_3fs_metadata_server}.py.
"""

from __future__ import annotations

import signal
import sqlite3
import threading
import time

import pytest
from hf3fs_builders import NBYTES, Opener, an_arena, component, free_port, keys_of, soon, store

from hicache_conformance.calls import Call, until
from hicache_core import Pages, Status
from hicache_core.errors import BackendIncompatible, BackendUnavailable, InvalidArgument, InvalidOptions
from hicache_hf3fs._schema import inconsistencies
from hicache_hf3fs.harness import Hf3fsHarness
from hicache_hf3fs.metadata import (
    NO_PAGE,
    PageFileConflict,
    PageFileLabel,
    PageFileUnknown,
    Terms,
    Written,
    new_ticket,
)
from hicache_hf3fs.metadata_http import MetadataClient
from hicache_hf3fs.metadata_local import LocalMetadata
from hicache_hf3fs.pagefile import open_page_file

OK, MISS, NO_SPACE, TIMEOUT = Status.OK, Status.MISS, Status.NO_SPACE, Status.TIMEOUT

LABEL = PageFileLabel("a" * 32, NBYTES, 8)


@pytest.mark.clause("C1")
def test_a_missing_key_in_the_middle_shifts_no_page(opener: Opener, client: str):
    """Seen: the later page's bytes in the missing page's slot, wrong bytes for the later one, as True."""
    arena, keys = an_arena(8), keys_of(4)
    storage = opener(arena, client=client)
    assert storage.batch_set([keys[0], keys[2], keys[3]], arena.pages([0, 2, 3])) == [OK, OK, OK]
    assert storage.batch_get(keys, arena.pages([4, 5, 6, 7])) == [OK, MISS, OK, OK]
    arena.check({4: b"\1" * NBYTES, 6: b"\3" * NBYTES, 7: b"\4" * NBYTES}, undefined=[5])


@pytest.mark.clause("C11")
def test_a_read_after_a_timeout_gets_its_own_page(opener: Opener, faults):
    """Seen: the next read returns the stale completion, page A's bytes for page B, reported as success."""
    arena, keys = an_arena(8), keys_of(2)
    storage = opener(arena, client="usrbio", timeout_s=0.3, numjobs=1)
    assert storage.batch_set(keys, arena.pages([0, 1])) == [OK, OK]
    faults.hold()
    assert storage.batch_get(keys[:1], arena.pages([4])) == [TIMEOUT]
    gate = threading.Event()
    faults.delay_s = lambda reads, offset: 0.0 * gate.wait(10)  # of what is begun from now on
    faults.release()
    assert storage.batch_get(keys[1:], arena.pages([5])) == [TIMEOUT], "A's completion is all there is yet"
    gate.set()
    got: list[list[Status]] = []
    assert until(lambda: got.append(storage.batch_get(keys[1:], arena.pages([5]))) or got[-1] == [OK])
    assert set(map(tuple, got)) <= {(OK,), (TIMEOUT,)}
    arena.check({5: b"\2" * NBYTES}, undefined=[4])


@pytest.mark.clause("C2")
def test_a_page_that_a_reader_holds_is_given_to_no_writer(metadata: LocalMetadata):
    """Seen: eviction hands the page that a reader holds to a writer."""
    metadata.initialize("kv", LABEL, deadline=soon())
    pages, hold = store(metadata, "kv", keys_of(8)), new_ticket()
    held = metadata.get_page_indices("kv", keys_of(8)[:3], hold=hold, deadline=soon())
    assert [ref and ref.page for ref in held] == pages[:3]
    assert sorted(store(metadata, "kv", keys_of(8, "new"))) == [NO_PAGE] * 3 + sorted(pages[3:])
    assert metadata.delete_keys(keys_of(8)[:3], deadline=soon()) == [True] * 3
    assert store(metadata, "kv", keys_of(1, "more")) not in [[page] for page in pages[:3]]
    metadata.end_read(hold)
    assert set(store(metadata, "kv", keys_of(3, "last"))) <= set(pages)


@pytest.mark.clause("C2", "C15")
def test_a_reader_in_flight_gets_its_page_while_a_writer_fills_the_store(opener: Opener, faults):
    """Seen: as above, and the reader was given the writer's bytes."""
    arena, keys = an_arena(8), keys_of(8)
    storage = opener(arena, client="usrbio", file_size=8 * NBYTES, numjobs=2)
    assert storage.batch_set(keys, arena.pages(range(8))) == [OK] * 8
    slot = an_arena(1)
    storage.add_pool(slot.pool)
    reading = threading.Event()
    gate = threading.Event()

    def slow(reads: bool, offset: int) -> float:
        if reads:
            reading.set()
            gate.wait(10)
        return 0.0

    faults.delay_s = slow
    call = Call(lambda: storage.batch_get(keys[:1], slot.pages([0])))
    assert reading.wait(10)
    for round_ in range(4):
        storage.batch_set(keys_of(8, f"filler-{round_}"), arena.pages(range(8)))
    gate.set()
    assert call.result() == [OK]
    slot.check({0: b"\1" * NBYTES})


@pytest.mark.clause("C15")
def test_reserving_when_all_pages_are_reserved_says_that_there_is_no_room(metadata: LocalMetadata):
    """Seen: all pages reserved, none confirmed: KeyError."""
    metadata.initialize("kv", LABEL, deadline=soon())
    wanted = [(key, "") for key in keys_of(8)]
    first = metadata.reserve_and_allocate_page_indices("kv", wanted, lease=new_ticket(), deadline=soon())
    more = [(key, "") for key in keys_of(2, "more")]
    second = metadata.reserve_and_allocate_page_indices("kv", more, lease=new_ticket(), deadline=soon())
    assert sorted(first) == [(False, page) for page in range(8)]
    assert second == [(False, NO_PAGE), (False, NO_PAGE)]


def test_a_store_whose_pages_are_all_taken_is_full(opener: Opener, faults):
    """Seen: as above, out of batch_set."""
    arena = an_arena(8)
    storage = opener(arena, client="usrbio", file_size=8 * NBYTES, timeout_s=0.3, numjobs=2)
    faults.hold()
    assert storage.batch_set(keys_of(8), arena.pages(range(8))) == [TIMEOUT] * 8
    assert storage.batch_set(keys_of(2, "more"), arena.pages([0, 1])) == [NO_SPACE] * 2
    faults.release()


def test_a_key_reserved_twice_leaks_no_page(tmp_path):
    """Seen: the same key reserved twice: a page leaks."""
    path = str(tmp_path / "m.sqlite")
    metadata = LocalMetadata(path, "0" * 32, Terms(60.0, 15.0))
    metadata.initialize("kv", LABEL, deadline=soon())
    key, leases, kept = keys_of(1)[0], [new_ticket() for _ in range(3)], []
    taken = [
        metadata.reserve_and_allocate_page_indices("kv", [(key, ""), (key, "")], lease=lease, deadline=soon())
        for lease in leases
    ]
    for lease, pair in zip(leases, taken, strict=True):
        written = [Written(key, page, NBYTES, None) for _, page in pair]
        kept.append(metadata.confirm_write("kv", written, [], lease=lease, deadline=soon()))
    assert kept == [[True, True]] * 3
    assert metadata.usage(deadline=soon())[:2] == (1, NBYTES)
    assert len(set(store(metadata, "kv", keys_of(7, "more")))) == 7
    metadata.close()
    with sqlite3.connect(path) as base:
        assert inconsistencies(base) == []
    base.close()


def test_pages_reserved_when_the_server_was_killed_come_back():
    """Seen: kill -9 of the server with 100 of 1000 reserved: 900 remain for ever."""
    harness = Hf3fsHarness({})
    harness.terms = {"lease": 1.0, "hold": 0.5}
    harness.start()
    try:
        metadata = MetadataClient(harness.options()["metadata_url"], "0" * 32)
        metadata.initialize("kv", PageFileLabel("a" * 32, NBYTES, 1000), deadline=soon())
        wanted = [(key, "") for key in keys_of(100)]
        metadata.reserve_and_allocate_page_indices("kv", wanted, lease=new_ticket(), deadline=soon())
        harness.kill()
        harness.restart()

        def free() -> int:
            lease, all_of_them = new_ticket(), [(key, "") for key in keys_of(1000, "all")]
            taken = metadata.reserve_and_allocate_page_indices(
                "kv", all_of_them, lease=lease, deadline=soon()
            )
            metadata.confirm_write("kv", [], [r.page for r in taken], lease=lease, deadline=soon())
            return sum(r.page != NO_PAGE for r in taken)

        assert free() == 900
        assert until(lambda: free() == 1000, 10.0)
        metadata.close()
    finally:
        harness.stop()


def test_initialising_a_page_file_with_another_size_is_an_error(metadata: LocalMetadata):
    """Seen: re-initialise with another size: ignored."""
    metadata.initialize("kv", LABEL, deadline=soon())
    metadata.initialize("kv", LABEL, deadline=soon())
    for other in (PageFileLabel("a" * 32, NBYTES, 9), PageFileLabel("a" * 32, NBYTES * 2, 8)):
        with pytest.raises(PageFileConflict) as caught:
            metadata.initialize("kv", other, deadline=soon())
        assert (caught.value.known, caught.value.met) == (LABEL, other)


def test_opening_a_page_file_with_another_page_size_or_size_is_an_error(tmp_path):
    """Seen: as above, on the file."""
    open_page_file(str(tmp_path), "kv", NBYTES, 8 * NBYTES).close()
    with pytest.raises(BackendIncompatible) as caught:
        open_page_file(str(tmp_path), "kv", NBYTES // 2, 8 * NBYTES)
    assert f"{NBYTES} bytes a page, wanted {NBYTES // 2}" in str(caught.value)
    with pytest.raises(InvalidOptions) as size:
        open_page_file(str(tmp_path), "kv", NBYTES, 9 * NBYTES)
    assert f"set file_size={8 * NBYTES}" in str(size.value)


@pytest.mark.clause("C1")
def test_a_set_of_eight_keys_has_eight_results(opener: Opener, client: str):
    """Seen: batch_set_v1 gives 16 results for 8 keys (K and V apart)."""
    arena = an_arena(8)
    storage = opener(arena, client=client)
    keys = keys_of(8)
    assert storage.batch_set(keys, arena.pages(range(8))) == [OK] * 8
    assert storage.batch_set(keys[:4] + keys_of(4, "new"), arena.pages(range(8))) == [OK] * 8


@pytest.mark.clause("C16")
def test_opening_replaces_no_signal_handler_and_works_off_the_main_thread(opener: Opener, client: str):
    """Seen: SIGINT, SIGTERM and SIGQUIT replaced; ValueError off the main thread."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    opened = [
        opener(an_arena(1), client=client),
        Call(lambda: opener(an_arena(1), client=client)).result(),
    ]
    assert [signal.getsignal(number) for number in numbers] == before
    for storage in opened:
        storage.close()
    assert [signal.getsignal(number) for number in numbers] == before


def test_pages_without_bytes_are_refused_by_name(opener: Opener, tmp_path):
    """Seen: bytes_per_page = 0: ZeroDivisionError."""
    with pytest.raises(InvalidArgument) as caught:
        open_page_file(str(tmp_path), "anchor", 0, 1 << 20)
    assert "'anchor' have no bytes" in str(caught.value)
    storage, anchor = opener(), component(0, "anchor")
    assert storage.batch_set(anchor.keys(["a"]), Pages.of_buffers([b""], anchor)) == [Status.ERROR]


def test_a_server_that_is_down_is_unavailable_at_once():
    """Seen: RuntimeError after 1.8 s."""
    metadata = MetadataClient(f"http://127.0.0.1:{free_port()}", "0" * 32, retries=2)
    started = time.monotonic()
    with pytest.raises(BackendUnavailable) as caught:
        metadata.exists(keys_of(1), deadline=soon(5.0))
    assert time.monotonic() - started < 1.0
    assert "cannot be reached" in str(caught.value)
    assert "Start hicache-hf3fs-metadata" in str(caught.value)
    metadata.close()


def test_a_file_that_was_not_initialised_is_told_from_a_server_that_is_down(server: Hf3fsHarness):
    """Seen: not initialised: 404 reported as "failed to connect"."""
    metadata = MetadataClient(server.options()["metadata_url"], "0" * 32)
    with pytest.raises(PageFileUnknown) as caught:
        metadata.reserve_and_allocate_page_indices("nobody", [("a", "")], lease=1, deadline=soon())
    assert caught.value.rank == "nobody"
    assert metadata.get_page_indices("nobody", ["a"], hold=1, deadline=soon()) == [None]
    metadata.close()
