"""The usrbio client on the double, and the double against the facts of the real library."""

from __future__ import annotations

import errno
import gc
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from hf3fs_builders import NBYTES, Opener, an_arena, component, keys_of, soon

from hicache_conformance.builders import Arena
from hicache_conformance.calls import Call, until
from hicache_core import Status
from hicache_core.errors import BackendDependencyMissing, BackendUnavailable, InvalidOptions
from hicache_hf3fs import usrbio_double as double
from hicache_hf3fs.options import Hf3fsOptions
from hicache_hf3fs.page_io import PageIO
from hicache_hf3fs.pagefile import PageFile, open_page_file
from hicache_hf3fs.usrbio_client import UsrbioClient
from hicache_hf3fs.usrbio_lane import Lane, _SharedMemory

OK, TIMEOUT = Status.OK, Status.TIMEOUT


@pytest.fixture
def mount(tmp_path: Path):
    (tmp_path / "3fs-virt" / "iovs").mkdir(parents=True)
    yield str(tmp_path)
    gc.collect()  # an exception that was caught keeps the frames that it came through
    assert os.listdir(tmp_path / "3fs-virt" / "iovs") == [], "an iovec's link was left behind"
    assert double.registered() == [], "a descriptor is still registered"
    assert [name for name in os.listdir("/dev/shm") if name.startswith(f"hicache-hf3fs-{os.getpid()}-")] == []


@pytest.fixture
def page_file(mount: str):
    file = open_page_file(mount, "kv", NBYTES, 64 * NBYTES)
    yield file
    os.close(file.fd)


def a_client(mount: str, **options) -> UsrbioClient:
    given = {"root": mount, "file_size": 64 * NBYTES, "client": "usrbio", "memory": 1 << 20} | options
    return UsrbioClient(Hf3fsOptions(usrbio_module="hicache_hf3fs.usrbio_double", **given))


@pytest.fixture
def moving(mount: str, page_file: PageFile, faults):
    """Make a client on the page file, detached and closed after the test."""
    made: list[UsrbioClient] = []

    def make(**options) -> UsrbioClient:
        made.append(a_client(mount, **options))
        made[-1].attach(page_file)
        return made[-1]

    yield make
    faults.reset()
    for client in made:
        client.close()
        client.detach(page_file)


def pages_at(file: PageFile, values: dict[int, bytearray]) -> list[PageIO]:
    return [PageIO(file.offset(i), [memoryview(value)], len(value)) for i, value in values.items()]


def written(client: UsrbioClient, file: PageFile, count: int) -> None:
    pages = pages_at(file, {i: bytearray([i + 1]) * NBYTES for i in range(count)})
    client.write(file, pages, checksum=False, deadline=soon())
    assert [page.result for page in pages] == [NBYTES] * count


# The client.


@pytest.mark.parametrize("entries", [1, 3, 32])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_batch_larger_than_all_lanes_moves_in_rounds(moving, page_file, entries, lanes):
    client = moving(entries=entries, numjobs=lanes)
    written(client, page_file, 20)
    slots = {i: bytearray(NBYTES) for i in range(20)}
    pages = pages_at(page_file, slots)
    client.read(page_file, pages, checksum=True, deadline=soon())
    assert [page.status for page in pages] == [OK] * 20
    assert [bytes(slot) for slot in slots.values()] == [bytes([i + 1]) * NBYTES for i in range(20)]


def test_a_ring_shallower_than_asked_for_is_reaped_and_filled_again(moving, page_file, faults):
    """EAGAIN when the ring is full: slots come back only when they are reaped."""
    faults.entries = 3
    client = moving(entries=16, numjobs=1)
    written(client, page_file, 16)
    pages = pages_at(page_file, {i: bytearray(NBYTES) for i in range(16)})
    client.read(page_file, pages, checksum=False, deadline=soon())
    assert [bytes(page.views[0][:1]) for page in pages] == [bytes([i + 1]) for i in range(16)]


@pytest.mark.clause("C10")
@pytest.mark.parametrize(
    ("number", "status"),
    [
        (errno.ENOSPC, Status.NO_SPACE),
        (errno.EACCES, Status.DENIED),
        (errno.ESTALE, Status.UNAVAILABLE),
        (errno.EIO, Status.ERROR),
    ],
)
def test_each_page_has_its_own_error(moving, page_file, faults, number, status):
    client = moving()
    written(client, page_file, 4)
    bad = page_file.offset(2)
    faults.result = lambda reading, offset, nbytes: -number if offset == bad else None
    slots = {i: bytearray(NBYTES) for i in range(4)}
    pages = pages_at(page_file, slots)
    client.read(page_file, pages, checksum=False, deadline=soon())
    assert [page.status for page in pages] == [OK, OK, status, OK]
    assert [slot[0] for slot in slots.values()] == [1, 2, 0, 4]


@pytest.mark.clause("C5")
def test_a_short_count_is_no_page(moving, page_file):
    client = moving()
    written(client, page_file, 4)
    os.truncate(page_file.path, page_file.offset(2) + 100)
    pages = pages_at(page_file, {i: bytearray(NBYTES) for i in range(4)})
    client.read(page_file, pages, checksum=False, deadline=soon())
    assert [(page.result, page.status) for page in pages] == [
        (NBYTES, OK),
        (NBYTES, OK),
        (100, Status.CORRUPT),
        (0, Status.CORRUPT),
    ]


@pytest.mark.clause("C2")
def test_completions_in_any_order_go_to_their_own_pages(moving, page_file, faults):
    client = moving()
    written(client, page_file, 8)
    faults.backwards = True
    bad = page_file.offset(1)
    faults.result = lambda reading, offset, nbytes: -errno.EIO if offset == bad else None
    slots = {i: bytearray(NBYTES) for i in range(8)}
    pages = pages_at(page_file, slots)
    client.read(page_file, pages, checksum=False, deadline=soon())
    assert [page.status for page in pages] == [OK, Status.ERROR] + [OK] * 6
    assert [slot[0] for slot in slots.values()] == [1, 0, 3, 4, 5, 6, 7, 8]


@pytest.mark.clause("C11", "C2")
def test_completions_that_come_late_go_to_nobody(moving, page_file, faults):
    client = moving(numjobs=2, entries=4)
    written(client, page_file, 8)
    faults.hold()
    lost = {i: bytearray(b"\xee") * NBYTES for i in range(4)}
    pages = pages_at(page_file, lost)
    client.read(page_file, pages, checksum=False, deadline=soon(0.2))
    assert [page.status for page in pages] == [TIMEOUT] * 4
    faults.release()
    for _ in range(20):
        slots = {i: bytearray(NBYTES) for i in (7, 6, 5, 4)}
        again = pages_at(page_file, slots)
        client.read(page_file, again, checksum=False, deadline=soon())
        assert [page.status for page in again] == [OK] * 4
        assert [slot[0] for slot in slots.values()] == [8, 7, 6, 5]
    assert [bytes(slot) for slot in lost.values()] == [b"\xee" * NBYTES] * 4


@pytest.mark.clause("C11")
def test_lanes_that_wait_for_completions_are_used_again_and_never_replaced(moving, page_file, faults):
    client = moving(numjobs=2, entries=2)
    written(client, page_file, 4)
    faults.hold()
    for _ in range(5):
        pages = pages_at(page_file, {i: bytearray(NBYTES) for i in range(4)})
        client.read(page_file, pages, checksum=False, deadline=soon(0.1))
        assert [page.status for page in pages] == [TIMEOUT] * 4
    assert (client._made, len(client._aside), len(client._idle)) == (2, 2, 0)
    faults.release()
    pages = pages_at(page_file, {i: bytearray(NBYTES) for i in range(4)})
    client.read(page_file, pages, checksum=False, deadline=soon())
    assert [page.status for page in pages] == [OK] * 4
    assert client._made == 2


@pytest.mark.clause("C4", "C11")
def test_a_write_that_was_left_behind_keeps_its_page_from_others(opener: Opener, faults):
    arena = an_arena(4)
    storage = opener(arena, client="usrbio", file_size=4 * NBYTES, timeout_s=0.3)
    faults.hold()
    assert storage.batch_set(keys_of(2), arena.pages([0, 1])) == [TIMEOUT] * 2
    faults.release()
    assert until(lambda: storage.batch_set(keys_of(2, "other"), arena.pages([2, 3])) == [OK] * 2)
    full = storage.batch_set(keys_of(3, "more"), arena.pages([0, 1, 2]))
    # Two pages of four are the late writes' until their lease ends; the two others change hands.
    assert full == [OK, OK, Status.NO_SPACE]
    assert storage.batch_contains(keys_of(2)) == [Status.MISS] * 2


def test_memory_is_bounded_and_a_page_that_does_not_fit_says_what_to_set(moving, mount):
    client = moving(numjobs=4, entries=4096, memory=1 << 20)
    large = open_page_file(mount, "large", 1 << 19, 1 << 20)
    with pytest.raises(InvalidOptions) as caught:
        client.attach(large)
    assert f"set memory to {4 << 19} or more" in str(caught.value)
    large.close()


def test_a_module_that_is_not_installed_says_how_to_build_it(mount):
    options = Hf3fsOptions(root=mount, file_size=1 << 20, client="usrbio", usrbio_module="hf3fs_absent.io")
    with pytest.raises(BackendDependencyMissing) as caught:
        UsrbioClient(options)
    assert caught.value.module == "hf3fs_absent.io"
    assert "github.com/deepseek-ai/3FS" in str(caught.value)
    assert "client=posix" in str(caught.value)


def test_a_root_off_3fs_is_named_with_the_remedy(tmp_path):
    options = Hf3fsOptions(root=str(tmp_path), file_size=1 << 20, usrbio_module="hicache_hf3fs.usrbio_double")
    with pytest.raises(BackendUnavailable) as caught:
        UsrbioClient(options)
    assert "does not lie on a 3FS mount" in str(caught.value)


def test_a_file_off_3fs_is_named_with_the_remedy(mount, tmp_path_factory):
    client, elsewhere = a_client(mount), open_page_file(str(tmp_path_factory.mktemp("off")), "kv", 4096, 8192)
    with pytest.raises(BackendUnavailable) as caught:
        client.attach(elsewhere)
    assert "Put root on the 3FS mount, or set client=posix" in str(caught.value)
    client.close()
    elsewhere.close()


@pytest.mark.clause("C12")
def test_closing_while_a_transfer_hangs_gives_everything_back(opener: Opener, faults):
    arena = an_arena(2)
    storage = opener(arena, client="usrbio", timeout_s=0.5)
    assert storage.batch_set(keys_of(1), arena.pages([0])) == [OK]
    faults.hold()
    call = Call(lambda: storage.batch_get(keys_of(1), arena.pages([1])))
    assert until(lambda: storage._gate.running > 0)
    storage.close()
    assert call.result() == [TIMEOUT]
    faults.release()
    assert double.registered() == []
    assert until(lambda: os.listdir(opener.root / "3fs-virt" / "iovs") == [])


def test_segments_of_a_page_are_gathered_and_scattered(opener: Opener):
    from hicache_conformance.builders import in_segments

    arena = Arena(component(), 4, in_segments(5))
    storage = opener(arena, client="usrbio")
    page = bytes(range(256)) * (NBYTES // 256)
    arena.fill(0, page)
    arena.freeze()
    assert storage.batch_set(keys_of(1), arena.pages([0])) == [OK]
    assert storage.batch_get(keys_of(1), arena.pages([3])) == [OK]
    arena.check({3: page})


# The double.


def a_ring(mount: str, entries: int = 4, **more) -> double.ioring:
    return double.make_ioring(mount, entries, **more)


def an_iovec(mount: str, nbytes: int = 4 * NBYTES) -> double.iovec:
    memory = _SharedMemory(nbytes)
    try:
        return double.make_iovec(memory, mount)
    finally:
        memory.unlink()


@pytest.fixture
def registered(page_file: PageFile):
    double.register_fd(page_file.fd)
    yield page_file.fd
    double.deregister_fd(page_file.fd)


def test_the_double_has_an_exact_depth_and_slots_that_return_when_reaped(mount, registered):
    ring, iov = a_ring(mount, 2), an_iovec(mount)
    for i in range(2):
        ring.prepare(iov[:NBYTES], True, registered, 0, i)
    with pytest.raises(OSError) as caught:
        ring.prepare(iov[:NBYTES], True, registered, 0)
    assert caught.value.errno == errno.EAGAIN
    ring.submit()
    assert [r.userdata for r in ring.wait(1, 1)] == [0]
    ring.prepare(iov[:NBYTES], True, registered, 0, 2)
    ring.submit()
    assert [r.userdata for r in ring.wait(4, 2, timedelta(seconds=5))] == [1, 2]


def test_the_double_gives_fewer_results_on_a_timeout_and_writes_afterwards(mount, registered, faults):
    ring, iov = a_ring(mount), an_iovec(mount)
    os.pwrite(registered, b"\7" * NBYTES, 0)
    faults.hold()
    ring.prepare(iov[:NBYTES], True, registered, 0, "late")
    ring.submit()
    assert ring.wait(1, 1, timedelta(seconds=0.05)) == []
    assert bytes(iov.view[:1]) == b"\0"
    faults.release()
    assert [(r.result, r.userdata) for r in ring.wait(1, 1, timedelta(seconds=5))] == [(NBYTES, "late")]
    assert bytes(iov.view[:NBYTES]) == b"\7" * NBYTES


@pytest.mark.parametrize(
    ("case", "number"),
    [
        ("direction", errno.EINVAL),
        ("empty", errno.EINVAL),
        ("descriptor", errno.EBADF),
        ("access", errno.EACCES),
    ],
)
def test_the_double_refuses_as_the_library_does(mount, page_file, registered, case, number):
    ring, iov = a_ring(mount), an_iovec(mount)
    write_only = os.open(page_file.path, os.O_WRONLY)
    double.register_fd(write_only)
    reading, part, fd = True, iov[:NBYTES], registered
    if case == "direction":
        reading = False
    elif case == "empty":
        part = iov[:0]
    else:
        fd = write_only if case == "access" else 999_999
    with pytest.raises(OSError) as caught:
        ring.prepare(part, reading, fd, 0)
    assert caught.value.errno == number
    double.deregister_fd(write_only)
    os.close(write_only)


def test_the_double_registers_a_descriptor_of_the_mount_once(mount, page_file, registered, tmp_path_factory):
    with pytest.raises(OSError) as twice:
        double.register_fd(registered)
    off = os.open(tmp_path_factory.mktemp("off") / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError) as elsewhere:
        double.register_fd(off)
    os.close(off)
    assert (twice.value.errno, elsewhere.value.errno) == (errno.EINVAL, errno.EBADF)
    with pytest.raises(FileNotFoundError):
        double.extract_mount_point(f"{mount}/nothing/here")


def test_the_double_waits_for_io_depth_transfers(mount, registered):
    ring, iov = a_ring(mount, 4, io_depth=2), an_iovec(mount)
    ring.prepare(iov[:NBYTES], True, registered, 0, 1)
    ring.submit()
    assert ring.wait(1, 1, timedelta(seconds=0.05)) == []
    ring.prepare(iov[:NBYTES], True, registered, 0, 2)
    ring.submit()
    assert [r.userdata for r in ring.wait(2, 2, timedelta(seconds=5))] == [1, 2]


def test_the_double_slices_with_step_one_and_removes_its_link(mount):
    iov = an_iovec(mount)
    assert len(os.listdir(f"{mount}/3fs-virt/iovs")) == 1
    with pytest.raises(ValueError):
        iov[::2]
    part = iov[10:20]
    del iov
    assert len(os.listdir(f"{mount}/3fs-virt/iovs")) == 1, "a slice keeps the whole alive"
    del part
    assert os.listdir(f"{mount}/3fs-virt/iovs") == []


def test_the_double_ends_its_threads(mount):
    before = threading.active_count()
    rings = [a_ring(mount) for _ in range(4)]
    assert threading.active_count() == before + 4
    del rings
    assert until(lambda: threading.active_count() == before)


@pytest.mark.clause("C11")
def test_what_an_interrupted_batch_left_in_the_ring_reaches_no_slot(opener: Opener, monkeypatch):
    """Its lane was idle again, and the next batch settled its pages as well."""
    arena = an_arena(4)
    storage = opener(arena, client="usrbio", numjobs=1)
    keys = keys_of(2)
    assert storage.batch_set(keys, arena.pages([0, 1])) == [OK] * 2

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Lane, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            storage.batch_get(keys[:1], arena.pages([2]))
    assert storage.batch_get(keys[1:], arena.pages([3])) == [OK]
    arena.check({3: b"\2" * NBYTES})
