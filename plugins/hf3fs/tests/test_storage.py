"""The storage on local metadata: exclusivity, crashes of its process, damage, networks, late writers."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
from hf3fs_builders import NBYTES, Held, Opener, an_arena, component, keys_of

from hicache_conformance.builders import Arena
from hicache_conformance.calls import Call
from hicache_core import Pages, Status
from hicache_core.errors import BackendTimeout, BackendUnavailable
from hicache_hf3fs import metadata_local, posix_client
from hicache_hf3fs._crew import Crew
from hicache_hf3fs._schema import inconsistencies
from hicache_hf3fs.page_io import PageIO

OK, MISS, CORRUPT = Status.OK, Status.MISS, Status.CORRUPT

_CHILD = """
import sys
from hicache_core import *
from hicache_core.factory import StorageBackendFactory
component = Component("kv", shard="whole", byte_order="page_first", format="bf16", page_nbytes=4096)
identity = Identity.for_tests()
config = HiCacheStorageConfig(namespace=Namespace.of(identity), identity=identity, placement=Placement())
pool = HostPool.from_buffer(bytearray(8 * 4096), component)
storage = StorageBackendFactory.create_backend("hf3fs", config, [pool], root=sys.argv[1], file_size=64 * 4096)
print("open", flush=True)
count = 0
for line in sys.stdin:
    keys = component.keys([f"child-{count + i}" for i in range(8)])
    for i in range(8):
        pool.pages([i]).views(0)[0][:] = bytes([(count + i) % 251]) * 4096
    print([status.name for status in storage.batch_set(keys, pool.pages(range(8)))], flush=True)
    count += 8
"""


@pytest.fixture
def child(opener: Opener):
    """Another process with a storage open on the root; it sets eight pages a line."""
    command = [sys.executable, "-c", _CHILD, str(opener.root)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    yield process
    process.kill()
    process.wait(10)
    process.stdin.close()
    process.stdout.close()


def test_a_root_belongs_to_one_process_and_the_second_is_told_what_to_do(opener: Opener, child):
    with pytest.raises(BackendUnavailable) as caught:
        opener(an_arena(1))
    assert "is in use by another process" in str(caught.value)
    assert "hicache-hf3fs-metadata" in str(caught.value)


@pytest.mark.clause("C14")
def test_what_a_killed_process_had_stored_is_there_and_nothing_has_leaked(opener: Opener, child):
    for _ in range(5):
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline().strip() == str(["OK"] * 8)
    child.stdin.write("go\n")
    child.stdin.flush()
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    arena = an_arena(8)
    storage = opener(arena)
    for start in range(0, 40, 8):
        keys = component().keys([f"child-{start + i}" for i in range(8)])
        assert storage.batch_get(keys, arena.pages(range(8))) == [OK] * 8
        arena.check({i: bytes([(start + i) % 251]) * NBYTES for i in range(8)})
    storage.close()
    with closing(sqlite3.connect(opener.root / "metadata.sqlite")) as base:
        assert inconsistencies(base) == []


def test_two_instances_of_one_process_share_a_root(opener: Opener):
    one, two = an_arena(2), an_arena(2)
    first, second = opener(one), opener(two)
    assert first.batch_set(keys_of(2), one.pages([0, 1])) == [OK, OK]
    assert second.batch_get(keys_of(2), two.pages([1, 0])) == [OK, OK]
    first.close()
    assert second.batch_contains(keys_of(2)) == [OK, OK]


@pytest.mark.clause("C9")
def test_namespaces_share_page_files_and_stay_apart(opener: Opener):
    arena = an_arena(4)
    mine, theirs = opener(arena, tenant="mine"), opener(arena, tenant="theirs")
    mine.batch_set(keys_of(2), arena.pages([0, 1]))
    theirs.batch_set(keys_of(2), arena.pages([2, 3]))
    assert len(list(opener.root.glob("*.pages"))) == 1
    assert mine.clear() == 2
    assert mine.batch_contains(keys_of(2)) == [MISS, MISS]
    assert theirs.batch_get(keys_of(2), arena.pages([0, 1])) == [OK, OK]
    arena.check({0: b"\3" * NBYTES, 1: b"\4" * NBYTES})


@pytest.mark.clause("C5", "C6")
def test_a_writer_that_went_on_after_its_lease_is_found_out(opener: Opener):
    """No lock keeps a stopped writer away from a page that is another's by now; the checksum does."""
    arena, keys = an_arena(4), keys_of(2)
    storage = opener(arena)
    assert storage.batch_set(keys, arena.pages([0, 1])) == [OK, OK]
    (path,) = opener.root.glob("*.pages")
    with path.open("r+b") as late:
        os.pwrite(late.fileno(), b"\xbb" * 100, 1000)
    assert storage.batch_get(keys, arena.pages([2, 3])) == [CORRUPT, OK]
    assert storage.batch_contains(keys) == [MISS, OK]
    assert storage.batch_set(keys, arena.pages([0, 1])) == [OK, OK]
    assert storage.batch_get(keys, arena.pages([2, 3])) == [OK, OK]
    arena.check({2: b"\1" * NBYTES, 3: b"\2" * NBYTES})


@pytest.mark.clause("C2")
def test_a_read_that_outlasts_its_hold_is_thrown_away(opener: Opener):
    """Its pages may have been given to a writer meanwhile, and without checksums nobody would see."""
    arena = an_arena(4)
    storage = opener(arena, checksum=False)
    assert storage.batch_set(keys_of(2), arena.pages([0, 1])) == [OK, OK]
    storage._terms = storage._terms._replace(hold_s=0.0)
    assert storage.batch_get([*keys_of(2), "x.kv"], arena.pages([1, 2, 3])) == [Status.TIMEOUT] * 2 + [MISS]


def test_without_checksums_pages_move_all_the_same(opener: Opener):
    arena = an_arena(4)
    storage = opener(arena, checksum=False)
    assert storage.batch_set(keys_of(2), arena.pages([0, 1])) == [OK, OK]
    storage.close()
    again = opener(arena, checksum=True)
    assert again.batch_get(keys_of(2), arena.pages([2, 3])) == [OK, OK]
    arena.check({2: b"\1" * NBYTES, 3: b"\2" * NBYTES})


@pytest.mark.parametrize(("network", "threads"), [(False, 2), (True, 8)])
def test_on_a_local_disk_no_more_threads_move_a_batch_than_there_are_cores(
    opener: Opener, monkeypatch, network, threads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    storage = opener(an_arena(1), network=network, numjobs=8)
    assert storage._client._crew._most == threads - 1


def test_over_a_network_reads_drop_the_cache_and_writes_are_flushed(opener: Opener, monkeypatch):
    dropped, flushed = [], []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, offset, nbytes, advice: dropped.append((offset, nbytes, advice))
    )
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    arena = an_arena(4)
    storage = opener(arena, network=True)
    storage.batch_set(keys_of(2), arena.pages([0, 1]))
    assert len(flushed) == 1
    storage.batch_get(keys_of(2), arena.pages([2, 3]))
    assert dropped == [(0, 2 * NBYTES, os.POSIX_FADV_DONTNEED)]


def test_a_flush_that_fails_confirms_nothing(opener: Opener, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    arena = an_arena(2)
    storage = opener(arena, fsync=True)
    monkeypatch.setattr(os, "fdatasync", full)
    assert storage.batch_set(keys_of(2), arena.pages([0, 1])) == [Status.NO_SPACE] * 2
    monkeypatch.undo()
    assert storage.batch_contains(keys_of(2)) == [MISS, MISS]
    assert storage.usage().pages == 0


def test_the_leading_keys_of_a_batch_get_what_room_there_is(opener: Opener):
    arena = an_arena(8)
    storage = opener(arena, file_size=5 * NBYTES)
    assert storage.batch_set(keys_of(8), arena.pages(range(8))) == [OK] * 5 + [Status.NO_SPACE] * 3


def test_each_component_has_a_page_file_of_its_own(opener: Opener):
    kv, mamba = an_arena(2), Arena(component(8192, "mamba"), 2)
    storage = opener(kv, mamba)
    storage.batch_set(keys_of(1), kv.pages([0]))
    storage.batch_set(mamba.component.keys(["s"]), mamba.pages([0]))
    names = sorted(path.name for path in opener.root.glob("*.pages"))
    assert names == sorted(f"{arena.component.key}.pages" for arena in (kv, mamba))
    assert storage.usage().capacity == 2 * 64 * NBYTES


def test_loose_buffers_are_served_without_a_pool(opener: Opener):
    storage, slot = opener(), bytearray(NBYTES)
    page = os.urandom(NBYTES)
    assert storage.batch_set(keys_of(1), Pages.of_buffers([page], component())) == [OK]
    assert storage.batch_get(keys_of(1), Pages.of_buffers([slot], component())) == [OK]
    assert bytes(slot) == page


@pytest.mark.clause("C12")
def test_the_last_verb_gives_everything_back_when_close_could_not_wait(opener: Opener, monkeypatch):
    arena = an_arena(2)
    storage = opener(arena, timeout_s=0.3)
    storage.batch_set(keys_of(1), arena.pages([0]))
    before = {name for name in os.listdir("/proc/self/fd")}
    reading = Held(monkeypatch, os, "preadv")
    call = Call(lambda: storage.batch_get(keys_of(1), arena.pages([1])))
    assert reading.entered.wait(10)
    storage.close()
    reading.go.set()
    assert call.result() == [OK]
    arena.check({1: b"\1" * NBYTES})
    assert storage._files == {}
    assert len(before - set(os.listdir("/proc/self/fd"))) >= 2, "the page file and the lock are still open"


# The posix client.


class ShortFile:
    """System calls that move less than they were asked to."""

    def __init__(self, monkeypatch, most: int) -> None:
        preadv, pwritev = os.preadv, os.pwritev
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, self.cut(views, most), at))
        monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, self.cut(views, most), at))

    @staticmethod
    def cut(views, most):
        kept = []
        for view in views:
            kept.append(view[:most])
            most -= len(kept[-1])
            if most <= 0:
                break
        return kept


@pytest.mark.parametrize("most", [1, 1000, NBYTES - 1, NBYTES + 1])
def test_short_counts_are_continued(opener: Opener, monkeypatch, most):
    from hicache_conformance.builders import in_segments

    ShortFile(monkeypatch, most)
    arena = Arena(component(), 4, in_segments(3))
    pages = {i: os.urandom(NBYTES) for i in range(2)}
    for i, page in pages.items():
        arena.fill(i, page)
    arena.freeze()
    storage = opener(arena)
    assert storage.batch_set(keys_of(2), arena.pages([0, 1])) == [OK, OK]
    assert storage.batch_get(keys_of(2), arena.pages([2, 3])) == [OK, OK]
    arena.check({2: pages[0], 3: pages[1]})


def page_ios(*offsets: int, nbytes: int = NBYTES, segments: int = 1) -> list[PageIO]:
    return [PageIO(at, [memoryview(bytearray(nbytes // segments))] * segments, nbytes) for at in offsets]


@pytest.mark.parametrize(
    ("pages", "runs"),
    [
        (page_ios(0, NBYTES, 2 * NBYTES), [[0, NBYTES, 2 * NBYTES]]),
        (page_ios(2 * NBYTES, 0, NBYTES), [[0, NBYTES, 2 * NBYTES]]),
        (page_ios(0, 2 * NBYTES), [[0], [2 * NBYTES]]),
        (page_ios(0, 0), [[0], [0]]),
        (page_ios(0, 1 << 20, nbytes=1 << 20), [[0], [1 << 20]]),
        (page_ios(0, NBYTES, segments=1024), [[0], [NBYTES]]),
    ],
    ids=["neighbours", "neighbours in disorder", "a hole", "one page twice", "a megabyte each", "IOV_MAX"],
)
def test_neighbours_in_the_file_move_together(pages, runs):
    assert [[page.offset for page in run] for run in posix_client._runs(pages)] == runs


def test_a_batch_that_is_late_stops_between_calls(opener: Opener):
    arena = an_arena(2)
    storage = opener(arena)
    storage.batch_set(keys_of(2), arena.pages([0, 1]))
    (file,) = storage._files.values()
    pages = page_ios(file.offset(0), file.offset(1))
    storage._mover.read(file, pages, checksum=True, deadline=0.0)
    assert [page.status for page in pages] == [Status.TIMEOUT] * 2


class Boom(Exception):
    pass


@pytest.mark.clause("C11")
@pytest.mark.parametrize("where", ["the caller", "a helper"])
def test_what_a_job_raises_is_raised_when_no_other_runs_any_more(where):
    """A helper that raised was waited for without end; a caller that raised left helpers at work."""
    crew, both, running = Crew(1), threading.Barrier(2), []
    caller = threading.current_thread()

    def job() -> None:
        both.wait(10)
        if (threading.current_thread() is caller) == (where == "the caller"):
            raise Boom
        running.append(1)
        threading.Event().wait(0.05)
        running.pop()

    with pytest.raises(Boom):
        crew.run([job, job])
    assert running == []
    done: list[int] = []
    crew.run([lambda: done.append(1), lambda: done.append(2)])
    assert sorted(done) == [1, 2]
    crew.close()


@pytest.mark.clause("C10")
def test_without_threads_a_batch_is_moved_by_its_caller(opener: Opener, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    arena = an_arena(4, 1 << 20)
    storage = opener(arena, file_size=8 << 20, numjobs=4)

    def none(_) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    keys = arena.component.keys(["a", "b"])
    assert storage.batch_set(keys, arena.pages([0, 1])) == [OK] * 2
    assert storage.batch_get(keys, arena.pages([2, 3])) == [OK] * 2
    arena.check({2: b"\1" * (1 << 20), 3: b"\2" * (1 << 20)})


@pytest.mark.clause("C12")
@pytest.mark.parametrize("verb", ["clear", "contains"])
def test_a_verb_that_close_left_behind_gives_everything_back_however_it_ends(
    opener: Opener, monkeypatch, verb
):
    storage = opener(an_arena(2), timeout_s=0.3)
    entered, gate = threading.Event(), threading.Event()

    def stuck(*_, **__):
        entered.set()
        gate.wait(20)
        if verb == "clear":
            raise BackendUnavailable("the disk", value="failed")
        return [False]

    monkeypatch.setattr(storage._metadata, "clear" if verb == "clear" else "exists", stuck)
    call = Call(storage.clear if verb == "clear" else lambda: storage.batch_contains(keys_of(1)))
    assert entered.wait(10)
    storage.close()
    gate.set()
    if verb == "clear":
        with pytest.raises(BackendUnavailable):
            call.result()
    else:
        assert call.result() == [MISS]
    assert (storage._files, storage._metadata) == ({}, None)
    opener(an_arena(1)).close()


@pytest.mark.clause("C13")
def test_a_child_that_was_forked_while_another_root_was_opened_can_open_one(opener: Opener, monkeypatch):
    """The lock around opening was held by nobody there, and the root's lock by the child."""
    opening = Held(monkeypatch, metadata_local, "PageTable")
    call = Call(lambda: opener(an_arena(1)))
    assert opening.entered.wait(10)
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(20)
            opening.free()
            opener(an_arena(1), root=str(opener.root.parent / "child"))
            signal.pause()
            status = 0
        finally:
            os._exit(status)
    try:
        opening.go.set()
        call.result().close()
        opener(an_arena(1)).close()  # the child holds no lock of it
        root, deadline = opener.root.parent / "child", time.monotonic() + 10
        while not any(root.glob("*.pages")):
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.clause("C10")
def test_an_open_waits_no_longer_than_its_deadline_for_another(opener: Opener, monkeypatch):
    opening = Held(monkeypatch, metadata_local, "PageTable")
    call = Call(lambda: opener(an_arena(1)))
    assert opening.entered.wait(10)
    opening.free()
    started = time.monotonic()
    with pytest.raises(BackendTimeout):
        opener(an_arena(1), root=str(opener.root.parent / "other"), timeout_s=0.3)
    assert time.monotonic() - started < 5
    opening.go.set()
    call.result().close()


@pytest.mark.clause("C2")
def test_a_report_that_is_late_leaves_what_was_read(opener: Opener, monkeypatch):
    arena = an_arena(4)
    storage = opener(arena)
    assert storage.batch_set(keys_of(2), arena.pages([0, 1])) == [OK] * 2
    file = storage._files[arena.component.key]
    os.pwrite(file.fd, b"damage", file.offset(0))

    def late(*_, **__):
        raise BackendTimeout("the server", remedy="")

    monkeypatch.setattr(storage._metadata, "report_bad", late)
    assert storage.batch_get(keys_of(2), arena.pages([2, 3])) == [CORRUPT, OK]
    assert arena.read(3) == b"\2" * NBYTES


@pytest.mark.clause("C11")
def test_an_interrupted_caller_outlasts_its_helpers(monkeypatch: pytest.MonkeyPatch):
    """A helper may still write into a slot, and the slot is the caller's again when the call returns."""
    crew, both, go, done = Crew(1), threading.Barrier(2), threading.Event(), []
    caller, wait = threading.current_thread(), threading.Condition.wait

    def interrupted(condition, timeout=None):
        if threading.current_thread() is caller and not go.is_set():
            go.set()
            raise KeyboardInterrupt
        return wait(condition, timeout)

    def job() -> None:
        both.wait(10)
        if threading.current_thread() is caller:
            monkeypatch.setattr(threading.Condition, "wait", interrupted)
        else:
            go.wait(10)
            done.append("helper")

    with pytest.raises(KeyboardInterrupt):
        crew.run([job, job])
    assert done == ["helper"]
    crew.close()
